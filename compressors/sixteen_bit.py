"""SixteenBitFloats: what the two 16-bit types share: every element, rounded."""

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
class SixteenBitFloats(LossyCompressor):
    """SixteenBitFloats: what the two 16-bit types share: every element, rounded.

    Sends every element in a 16-bit type.

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


@dataclasses.dataclass(kw_only=True)
class Bf16(SixteenBitFloats, name="bf16"):
    """Brain float: every element as bf16, the range of fp32 with 8 bits of mantissa.

    8 bits of mantissa: relative rounding error up to 2^-9, never out of range.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclasses.dataclass(kw_only=True)
class Fp16(SixteenBitFloats, name="fp16"):
    """Half precision: every element as IEEE fp16, saturating so that no sum over ranks overflows.

    11 bits of mantissa, range 6e-8 to 65504.

    PyTorch's own hook divides by the number of ranks before it sends, to avoid overflow, and loses small gradients to
    underflow; this one saturates at 65504 / ranks and divides afterwards.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    dtype: ClassVar[torch.dtype] = torch.float16
