"""No compression: the gradient in fp32, the yardstick."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.dense import Dense
from compressors.base import Compressor, Granularity
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class NONE(Compressor):  # in capitals, for None is taken
    """Sends every element as fp32.

    Bytes: 16 + 4 m for a bucket of m elements.
    """

    biased: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "bucket"

    def leaves_dense(self, layer: Layer) -> bool:
        """Every layer, which saves a copy on the way to `encode`."""
        return True

    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Dense:
        """A copy of `x`."""
        return Dense(x.clone())

    def contraction_bound(self, layer: Layer) -> float:
        """Nothing is lost."""
        return 0.0

    def expected_nbytes(self, layer: Layer) -> int:
        """Header and 4 bytes per element."""
        return HEADER_BYTES + 4 * layer.numel
