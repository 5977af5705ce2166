"""Methods that send every element as a floating-point number: `none`, `bf16` and `fp16`."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from collectives.payloads import Dense, Payload
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.codec.values import to_value_dtype
from compressors.base import Granularity, LossyCompressor, PerLayer
from compressors.layer import Layer, Step
from compressors.parts.buckets import NonFinite, is_finite, split, summed


@dataclasses.dataclass(kw_only=True)
class NoCompression(PerLayer, name="none"):
    """No compression: sends the gradient in fp32, as the baseline for every other method.

    Bytes: 16 + 4 m for a bucket of m elements.
    """

    biased: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "bucket"
    keeps_fp64: ClassVar[bool] = True  # fp64 may exceed the range of fp32

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        return True

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Dense:
        return Dense(x.clone())

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Dense:
        values = step.memory.buffers.acquire(layers, self.traits.dtype_for(gradients[0]), gradients[0].device)
        for gradient, out in zip(gradients, split(values, layers), strict=True):
            out.copy_(gradient)
        if screen and not is_finite(values):
            raise NonFinite
        return Dense(values)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return 0.0

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return HEADER_BYTES + 4 * layer.numel


@dataclasses.dataclass(kw_only=True)
class SixteenBitFloats(LossyCompressor):
    """Base of the methods that send every element in a 16-bit type.

    Collective `native` adds in that type; the other collectives add in fp32 and round once per hop.
    """

    granularity: ClassVar[Granularity] = "bucket"
    dtype: ClassVar[torch.dtype]

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Dense:
        return self._rounded([x], [layer], step)

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        if left is not None:
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        return self._rounded([*summed(gradients, None, None, layers, screen=screen)], layers, step)

    def _rounded(self, xs: Sequence[torch.Tensor], layers: Sequence[Layer], step: Step) -> Dense:
        values = Dense.room(sum(layer.numel for layer in layers), self.dtype, xs[0].device)
        for x, out in zip(xs, split(values, layers), strict=True):
            to_value_dtype(x, self.dtype, step.world_size, out=out)
        return Dense(values)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return float(torch.finfo(self.dtype).eps / 2) ** 2  # half a unit in the last place

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return HEADER_BYTES + 2 * layer.numel


@dataclasses.dataclass(kw_only=True)
class Bf16(SixteenBitFloats, name="bf16"):
    """Brain float: sends every element as bf16, which has the range of fp32 and 8 bits of mantissa.

    The relative rounding error is at most 2^-9, and no value is out of range.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16


@dataclasses.dataclass(kw_only=True)
class Fp16(SixteenBitFloats, name="fp16"):
    """Half precision: sends every element as IEEE fp16, saturated so that no sum over ranks overflows.

    fp16 has 11 bits of mantissa and a range of 6e-8 to 65504. PyTorch's own hook divides by the number of ranks before
    it sends, to avoid overflow, and loses small gradients to underflow. This method saturates at 65504 / ranks and
    divides after the sum.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    dtype: ClassVar[torch.dtype] = torch.float16
