"""Every n-th entry of a layer, the next ones at the next step; what is not sent waits."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import torch
from annotated_types import Ge
from typing_extensions import Doc

from collectives.payloads import Sparse
from compressors.base import LossyCompressor
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class EveryNth(LossyCompressor):
    """Positions `step`, `step + n`, `step + 2 n`, ... modulo n, the same on every rank."""

    sends = Sparse

    n: Annotated[int, Ge(1), Doc("steps after which every entry was sent once")] = 10
    error_feedback: Annotated[bool, Doc("add what was not sent to the next gradient")] = True

    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Sparse:
        """Return the entries whose turn it is."""
        indices = torch.arange(step.index % self.n, x.numel(), self.n, device=x.device)
        return Sparse(x.numel(), indices, x[indices])

    def expected_nbytes(self, layer: Layer) -> int:
        """Return the closed form for a layer whose length n divides."""
        return Sparse.packed_nbytes(layer.numel, layer.numel // self.n, torch.float32)
