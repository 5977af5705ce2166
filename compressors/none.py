"""No compression: sends the gradient in fp32, as the baseline for every other method."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.dense import Dense
from compressors.base import Granularity, PerLayer
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class NoCompression(PerLayer, name="none"):
    """No compression: sends the gradient in fp32, as the baseline for every other method.

    Bytes: 16 + 4 m for a bucket of m elements.
    """

    biased: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "bucket"

    def leaves_dense(self, layer: Layer) -> bool:
        """Return True for every layer, which saves the copy that `encode` would make."""
        return True

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Dense:
        return Dense(x.clone())

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return 0.0

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return HEADER_BYTES + 4 * layer.numel
