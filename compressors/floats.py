"""Methods that lose at most rounding: `none`, `bf16`, `fp16`, and `row_sparse`, which does not send rows of zeros."""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.kernels.loop import Parts
from collectives.payloads import Dense, Payload, RowSparse
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.codec.values import to_value_dtype
from compressors.base import DenseEnds, ErrorFeedback, Granularity, MinNumel, PerLayer, Skip, Traits
from compressors.layer import Layer, Step, end_to_end
from compressors.parts.buckets import NonFinite, is_finite, split, summed
from compressors.parts.values import TORCH_DTYPES, ValueDtype, roundoff


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
class PartsEncoder(PerLayer):
    """Base of the compressors that encode all gradients of a bucket together, without first concatenating them."""

    granularity: ClassVar[Granularity] = "bucket"

    error_feedback: ErrorFeedback = False
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False

    @abc.abstractmethod
    def encode_parts(self, x: Parts, layer: Layer, step: Step) -> Payload:
        """Return the payload of `x`, tensors that are encoded as one flat tensor, fp32 [layer.numel]."""

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self.encode_parts(Parts([x]), layer, step)

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
        x = Parts([*summed(gradients, None, None, layers, screen=screen)])
        return self.encode_parts(x, end_to_end(layers), step)


@dataclasses.dataclass(kw_only=True)
class Bf16(PartsEncoder, name="bf16"):
    """Brain float: sends every element as bf16, which has the range of fp32 and 8 bits of mantissa.

    The relative rounding error is at most 2^-9, and no value is out of range. Collective `native` adds in bf16; other
    collectives add in fp32 and round once per hop.

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
    """Half precision: sends every element as IEEE fp16, clamped so that no sum over ranks overflows.

    fp16 has 11 bits of mantissa and a range of 6e-8 to 65504. PyTorch's own hook divides by the number of ranks before
    it sends, to avoid overflow, and so loses small gradients to underflow. This method clamps magnitudes to
    65504 / ranks, and divides after the sum.

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


@dataclasses.dataclass(kw_only=True)
class NonZeroRows(PerLayer, name="row_sparse"):
    """Row-sparse: sends the rows of embeddings whose gradient is not zero, and all other layers in fp32.

    Source: `row_sparse` gradients of embeddings in Apache MXNet's KVStore; sparse gradients of `torch.nn.Embedding`.
    Differs: backward makes a dense gradient; its rows of zeros are found here and not sent.

    A batch changes only the rows of its tokens. So this method loses nothing (with value_dtype=fp32), and saves much if
    an embedding has many more rows than a batch has tokens. It saves nothing if every row gets a gradient, as with tied
    weights.

    Bytes: per embedding, 24 + z w v + the cheapest coding of z row numbers (at most rows / 8), for z rows that are not
    zero, w elements per row and v bytes per value; 16 + 4 m for all other layers together.
    """

    sends: ClassVar[type[Payload]] = RowSparse
    biased: ClassVar[bool] = False

    value_dtype: Annotated[ValueDtype, Doc("type of the rows' values on the wire")] = "fp32"

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        return dataclasses.replace(super().traits, emits=frozenset({RowSparse, Dense}))

    @override
    def leaves_dense(self, layer: Layer) -> bool:
        return layer.kind != "embedding"

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> RowSparse:
        matrix = x.view(layer.shape[0], -1)
        rows = matrix.any(1).nonzero().view(-1)
        values = to_value_dtype(matrix[rows], TORCH_DTYPES[self.value_dtype], step.world_size)
        return RowSparse(x.numel(), rows, values)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return roundoff(self.value_dtype) ** 2

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return None  # it depends on how many rows are not zero
