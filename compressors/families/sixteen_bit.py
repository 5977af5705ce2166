"""SixteenBit: what the two 16-bit types share: every element, rounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.dense import Dense
from compressors.base import Granularity, LossyCompressor
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class SixteenBit(LossyCompressor):
    """Sends every element in a 16-bit type.

    The backend adds in that type; our own collectives add in fp32 and round once per hop.
    """

    granularity: ClassVar[Granularity] = "bucket"
    dtype: ClassVar[torch.dtype]

    @override
    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Dense:
        values = Dense.room(layer.numel, self.dtype, gradients[0].device)
        for gradient, out in zip(gradients, values.split([len(part) for part in gradients]), strict=True):
            to_value_dtype(gradient, self.dtype, step.world_size, out=out)
        return Dense(values)

    def contraction_bound(self, layer: Layer) -> float:
        """Half a unit in the last place, squared."""
        return float(torch.finfo(self.dtype).eps / 2) ** 2

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return HEADER_BYTES + 2 * layer.numel
