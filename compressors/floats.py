"""Methods that send every element as a floating-point number: `none`, `bf16` and `fp16`."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from collectives.kernels.loop import Parts
from collectives.payloads import Dense
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.codec.values import to_value_dtype
from compressors.base import Granularity, PartsEncoder, PerLayer
from compressors.layer import Layer, Step
from compressors.parts.buckets import NonFinite, is_finite, split
from compressors.parts.values import roundoff


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


def _rounded(x: Parts, dtype: torch.dtype, step: Step) -> Dense:
    values = Dense.room(x.numel, dtype, x.device)
    for part, out in zip(x.tensors, values.split([len(part) for part in x.tensors]), strict=True):
        to_value_dtype(part, dtype, step.world_size, out=out)
    return Dense(values)


@dataclasses.dataclass(kw_only=True)
class Bf16(PartsEncoder, name="bf16"):
    """Brain float: sends every element as bf16, which has the range of fp32 and 8 bits of mantissa.

    The relative rounding error is at most 2^-9, and no value is out of range. Collective `native` adds in that type;
    the others add in fp32 and round once per hop.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    @override
    def encode_parts(self, x: Parts, layer: Layer, step: Step) -> Dense:
        return _rounded(x, torch.bfloat16, step)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return roundoff("bf16") ** 2  # half a unit in the last place

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return HEADER_BYTES + 2 * layer.numel


@dataclasses.dataclass(kw_only=True)
class Fp16(PartsEncoder, name="fp16"):
    """Half precision: sends every element as IEEE fp16, saturated so that no sum over ranks overflows.

    fp16 has 11 bits of mantissa and a range of 6e-8 to 65504. PyTorch's own hook divides by the number of ranks before
    it sends, to avoid overflow, and loses small gradients to underflow. This method saturates at 65504 / ranks and
    divides after the sum.

    Bytes: 16 + 2 m for a bucket of m elements.
    """

    @override
    def encode_parts(self, x: Parts, layer: Layer, step: Step) -> Dense:
        return _rounded(x, torch.float16, step)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return roundoff("fp16") ** 2  # half a unit in the last place

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return HEADER_BYTES + 2 * layer.numel
