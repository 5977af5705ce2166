"""Send every n-th entry of a layer, with an offset that moves each step; error feedback keeps the others."""

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
    """Send positions `step`, `step + n`, `step + 2 n`, ... modulo n, the same on every rank."""

    sends = Sparse

    n: Annotated[int, Ge(1), Doc("steps after which every entry was sent once")] = 10

    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Sparse:
        """Return the entries of this step."""
        indices = torch.arange(step.index % self.n, x.numel(), self.n, device=x.device)
        return Sparse(x.numel(), indices, x[indices])

    def expected_nbytes(self, layer: Layer) -> int:
        """Return the bytes of a layer whose length is a multiple of n."""
        return Sparse.packed_nbytes(layer.numel, layer.numel // self.n, torch.float32)
