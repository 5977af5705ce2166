"""The forms (types or codes) in which a sparse method sends the values of its entries.

A `ValueForm` turns entries into a payload: `FloatForm`, `CodeForm` (2 or 8 bits per value), or `Levels` (4 bits).
"""

from __future__ import annotations

import abc
import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from typing_extensions import Doc, override

from collectives.payloads import Payload, Sparse, SparseCodes, SparseLevels
from collectives.payloads.codec.value_codes import MOST_STEPS, SHARED_OVER, ValueCoding, block_length
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.sparse import LARGEST, NUM_LEVELS, IndexedValues
from compressors.kernels import batches
from compressors.kernels.quantisation import pack_nearest_levels
from compressors.kernels.selection import largest_magnitude, magnitude_range
from compressors.kernels.value_codes import code_values
from compressors.parts.buckets import NonFinite, bundled

ValueDtype = Literal["fp16", "bf16", "fp32"]
Values = Literal["floats", "two_magnitudes", "sigma", "int8"]
ValueDtypeOption = Annotated[ValueDtype, Doc("type of the values on the wire")]
ValuesOption = Annotated[
    Values, Doc("floats of value_dtype, or codes: 2 bits (two_magnitudes, sigma) or 8 bits per value")
]

TORCH_DTYPES: dict[ValueDtype, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}
# Largest relative error of a magnitude that is decoded as a product, or as the last of eight products.
TOP_ROUNDOFF = 1e-6


def roundoff(dtype: ValueDtype) -> float:
    """Return the largest relative rounding error of fp32 values within the type's normal range."""
    return 0.0 if dtype == "fp32" else torch.finfo(TORCH_DTYPES[dtype]).eps / 2


class ValueForm(abc.ABC):
    """A form in which values are sent, such as fp16 or codes; `kind` is the class of the payloads."""

    kind: ClassVar[type[Payload]]

    @abc.abstractmethod
    def payload(self, numel: int, positions: torch.Tensor, values: torch.Tensor, world_size: int) -> IndexedValues:
        """Return the payload of entries `values`, fp32 [k], at ascending positions; entries that become 0 are left out.

        Values are clamped so that no sum of them over `world_size` ranks overflows.
        """

    def bound_for(self, share: float) -> float:
        """Return a bound on |x - C(x)|^2 / |x|^2, if the entries that are sent hold at least this share of |x|^2."""
        return 1.0

    @abc.abstractmethod
    def nbytes(self, numel: int, k: int) -> int:
        """Return the bytes of a payload of k entries, none of them zero, for a layer of `numel` elements."""

    def send(
        self,
        left: torch.Tensor,
        numels: Sequence[int],
        counts: Sequence[int],
        positions: torch.Tensor,
        world_size: int,
        *,
        screen: bool,
    ) -> Payload:
        """Return the payload of entries of several layers, and subtract it from the layers; all tensors lie on a CPU.

        Args:
            left: fp32 [numel of all layers], the layers end to end; mutated.
            numels: number of elements of each layer.
            counts: number of entries of each layer.
            positions: int64, ascending within each layer and counted from the layer's start; may be overwritten.
            world_size: as in `payload`.
            screen: True to raise an error if an entry is not finite.

        Raises:
            NonFinite: `screen` is True, and an entry is not finite.
        """
        payloads = []
        for chosen, rest in zip(positions.split([*counts]), left.split([*numels]), strict=True):
            values = rest.index_select(0, chosen)
            if screen and largest_magnitude(values) == math.inf:
                raise NonFinite
            payloads.append(self.payload(len(rest), chosen, values, world_size))
            payloads[-1].subtract_from_(rest)
        return bundled(payloads)


@dataclasses.dataclass(frozen=True)
class FloatForm(ValueForm):
    """Values are sent as floating-point numbers of the type `value_dtype`."""

    kind: ClassVar[type[Payload]] = Sparse

    value_dtype: ValueDtype

    @override
    def payload(self, numel: int, positions: torch.Tensor, values: torch.Tensor, world_size: int) -> Sparse:
        values = to_value_dtype(values, TORCH_DTYPES[self.value_dtype], world_size)
        if not values.all():
            positions, values = positions[values != 0], values[values != 0]
        return Sparse(numel, positions, values)

    @override
    def bound_for(self, share: float) -> float:
        return 1 - share * (1 - roundoff(self.value_dtype) ** 2)

    @override
    def nbytes(self, numel: int, k: int) -> int:
        return Sparse.packed_nbytes(numel, k, TORCH_DTYPES[self.value_dtype])

    @override
    def send(
        self,
        left: torch.Tensor,
        numels: Sequence[int],
        counts: Sequence[int],
        positions: torch.Tensor,
        world_size: int,
        *,
        screen: bool,
    ) -> Payload:
        dtype = TORCH_DTYPES[self.value_dtype]
        payload = batches.send_from_layers(left, numels, counts, positions, dtype, world_size, finite=screen)
        if payload is None:
            raise NonFinite
        return payload


@dataclasses.dataclass(frozen=True)
class CodeForm(ValueForm):
    """Values are sent as codes of 2 or 8 bits.

    two_magnitudes: a sign bit, and a bit that selects one of two magnitudes in bf16. The values sent of 4096 elements
        (at least 32 values) share the two magnitudes. Five rounds of Lloyd's method, which start from the median, find
        these magnitudes.
    sigma: four levels for all values of a payload, each 1.5 standard deviations wide; a code is decoded as the mean of
        its level.
    int8: a whole number of steps. The step size is shared by as many values as share magnitudes in two_magnitudes.

    Source: S. P. Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory 28 (1982); sigma:
    the code of SparseLoCo, Sarfi et al. 2025 (arXiv:2508.15706; one-covenant/templar, tplr/compress.py).
    Differs: sigma takes 2 bits per code, not a byte, and the means of its levels include the mean of all values.
    """

    kind: ClassVar[type[Payload]] = SparseCodes

    coding: ValueCoding

    @override
    def payload(self, numel: int, positions: torch.Tensor, values: torch.Tensor, world_size: int) -> SparseCodes:
        if not values.all():
            positions, values = positions[values != 0], values[values != 0]
        return self.of_groups(numel, numel, max(1, len(values)), positions, values)

    def of_groups(
        self,
        numel: int,
        group_size: int,
        k: int,
        positions: torch.Tensor,
        values: torch.Tensor,
        left: torch.Tensor | None = None,
    ) -> SparseCodes:
        """Return the payload of k entries of every group; the entries are `values`, fp32 [z], and may be zero.

        `numel`, `group_size`, `k` and `positions` are as in `SparseCodes`. If `left`, fp32 [numel], is not None, the
        payload is subtracted from it.
        """
        block, rest = block_length(self.coding, len(values), numel), None if left is None else (positions, left)
        tables, packed, arrived = code_values(values, self.coding, block, rest)
        return SparseCodes(numel, group_size, k, positions, self.coding, tables, packed).holding(arrived)

    @override
    def bound_for(self, share: float) -> float:
        match self.coding:
            case "two_magnitudes":
                # if n values v of a block all become their mean magnitude, sum(v)^2 / n of their squares is kept
                return 1 - share * (1 - roundoff("bf16") ** 2) / SHARED_OVER
            case "sigma":
                return 1.0  # all values may lie in one level whose mean is zero
            case "int8":
                # each of n values of a block loses at most half a step, which is 1 / 254 of the largest
                return 1 - share * (1 - SHARED_OVER / (2 * MOST_STEPS) ** 2) * (1 - TOP_ROUNDOFF)

    @override
    def nbytes(self, numel: int, k: int) -> int:
        return SparseCodes.packed_nbytes(numel, numel, k, self.coding)


class Levels(ValueForm):
    """Values are sent as codes of 4 bits: magnitudes form a geometric sequence from smallest to largest entry."""

    kind: ClassVar[type[Payload]] = SparseLevels

    @override
    def payload(self, numel: int, positions: torch.Tensor, values: torch.Tensor, world_size: int) -> SparseLevels:
        low, high = magnitude_range(values)
        if low == 0:
            positions, values = positions[values != 0], values[values != 0]
            if not len(values):
                return SparseLevels(numel, positions, 0.0, 0.0, values.new_empty(0, dtype=torch.uint8))
            low, high = magnitude_range(values)
        low, high = min(low, LARGEST), min(high, LARGEST)
        ratio = max(1.0, ctypes.c_float((high / low) ** (1 / (NUM_LEVELS - 1))).value)
        return SparseLevels(numel, positions, low, ratio, pack_nearest_levels(values, low, ratio))

    @override
    def nbytes(self, numel: int, k: int) -> int:
        return SparseLevels.packed_nbytes(numel, k)
