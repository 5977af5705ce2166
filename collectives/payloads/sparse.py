"""Sparse and Seeded: payloads with values at ascending positions, which are sent or follow from a random seed.

Sparse body: values and indices, wider type first; the header's flags say how the indices are coded
(`codec/index_sets.py`). If the dense form is no longer, the payload is sent as `Dense` instead. If all values are
zero, only the header is sent. Seeded body: seed u64 | values.

Bytes: 16 + min over codings (z v + indices), at most 16 + m v.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import math
import struct
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from typing_extensions import override

from collectives.kernels.loop import Float, FloatArray, Int, LongArray, Longs, Loop, array, longs
from collectives.payloads.base import HEADER_BYTES, Header, KeepLost, Payload, TypedValues
from collectives.payloads.codec.index_sets import (
    CODINGS,
    add_index_sets,
    cheapest_coding,
    check_numel,
    coding_nbytes,
    decode_indices,
    encode_indices,
    index_set_nbytes,
    seeded_positions,
)
from collectives.payloads.codec.values import SHORT, add_values, divided, lost_in_sum
from collectives.payloads.dense import Dense
from collectives.payloads.fields import Field, PayloadError, Reader, with_room

_WRITE = Loop("write_sum", Longs, Longs, Longs, Longs, Longs, Int, Float, Int, Longs, Longs, Int)
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def write_sum_(
    values: Sequence[torch.Tensor], positions: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, divisor: float
) -> bool:
    """Write (term 0 + term 1 + ...) / divisor into `parts`; bit for bit as if added to zeros.

    Args:
        values: floating [n] of each term; at least one term.
        positions: int64 [n] of each term, ascending.
        parts: 1-D, `numel` elements together; overwritten.
        divisor: applied to the sum.

    Returns:
        False, with `parts` unchanged, if no native loop supports these tensors.

    Raises:
        IndexError: the positions of a term do not ascend within the parts' elements.
    """
    tensors = [*parts, *values]
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in parts):
        return False
    if any(held.dtype not in _KINDS for held in values) or not _WRITE.serves(*tensors):
        return False
    values, positions = ([held.contiguous() for held in each] for each in (values, positions))
    kinds = longs([_KINDS[held.dtype] for held in values])
    counts, following = _numels(values), longs([0] * len(values))
    divide_first = math.frexp(divisor)[0] == 0.5  # dividing by a power of two is exact
    _WRITE(
        _addresses(values), kinds, _addresses(positions), counts, following, len(values), divisor, divide_first,
        _addresses(parts), _numels(parts), len(parts),
    )  # fmt: skip
    if list(following) != list(counts):
        raise IndexError(f"positions do not ascend within the {sum(part.numel() for part in parts)} elements")
    return True


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return longs([tensor.data_ptr() for tensor in tensors])


def _numels(tensors: Sequence[torch.Tensor]) -> Any:
    return longs([tensor.numel() for tensor in tensors])


_ADD_AT = {
    dtype: Loop(name, array(dtype), LongArray, Int, Float, FloatArray, Int, returns=Int)
    for dtype, name in (
        (torch.float32, "add_fp32_at"),
        (torch.float16, "add_fp16_at"),
        (torch.bfloat16, "add_bf16_at"),
    )
}
ANY, MINUS_ZERO = 1, 2
_SURVEY = {
    dtype: Loop(name, array(dtype), Int, returns=Int)
    for dtype, name in (
        (torch.float32, "survey_fp32"),
        (torch.float16, "survey_halves"),
        (torch.bfloat16, "survey_halves"),
    )
}


class IndexedValues(TypedValues):
    """A payload with values, floating [num_entries], at strictly ascending positions; zero elsewhere."""

    @property
    @abc.abstractmethod
    def positions(self) -> torch.Tensor:
        """Return the flat positions, int64 [num_entries], strictly ascending."""

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        self._add_at(dense, divisor)

    @override
    def write_all_to(self, others: Sequence[Payload], parts: Sequence[torch.Tensor], *, divisor: float) -> bool:
        terms = [term for term in (self, *others) if isinstance(term, IndexedValues)]
        if len(terms) < 1 + len(others):
            return False
        return write_sum_([t.values for t in terms], [t.positions for t in terms], parts, divisor=divisor)

    @override
    def subtract_from_(self, dense: torch.Tensor) -> None:
        self._add_at(dense, -1.0)

    def _add_at(self, dense: torch.Tensor, divisor: float) -> None:
        positions, values = self.positions, self.values
        loop = _ADD_AT.get(values.dtype)
        if loop is None or dense.dtype != torch.float32 or not (dense.is_contiguous() and loop.serves(dense, values)):
            dense.scatter_add_(0, positions, divided(values, divisor, dense.dtype))
        elif not loop(values.contiguous(), positions.contiguous(), values.numel(), divisor, dense, dense.numel()):
            raise IndexError(f"a position lies outside the {dense.numel()} elements")

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        dense.index_fill_(0, self.positions, 0)

    @override
    def entries_between(self, borders: list[int]) -> list[int]:
        if self.positions.is_cpu:  # numpy is faster for a few numbers
            before = np.searchsorted(self.positions.numpy(), borders).tolist()
        else:
            before = torch.searchsorted(self.positions, torch.tensor(borders, device=self.device)).tolist()
        return [stop - start for start, stop in itertools.pairwise(before)]

    def _added_onto(self, values: torch.Tensor, keep_lost: KeepLost | None) -> torch.Tensor:
        total = values.to(torch.promote_types(values.dtype, self.values.dtype), copy=True)
        here = total.index_select(0, self.positions)
        there = add_values(here, self.values).to(total.dtype)
        if keep_lost is not None and total.dtype in SHORT:
            keep_lost(0, lost_in_sum(here, self.values, there), self.positions)
        return total.index_copy_(0, self.positions, there)


def canonical_values(values: torch.Tensor) -> torch.Tensor:
    """Return the values with -0.0 replaced by +0.0 (copied only if needed), or an empty tensor if all are zero.

    A dense sum gives 0 + -0.0 = +0.0, but merging two sparse payloads would copy a -0.0 that only one of them has.
    """
    survey = _SURVEY.get(values.dtype)
    if survey is not None and survey.serves(values):
        found = survey(values.contiguous(), values.numel())
        kept = values if found & ANY else values[:0]
        return kept.masked_fill(kept == 0, 0) if found & MINUS_ZERO else kept
    if not values.numel():
        return values
    smallest, largest = values.aminmax()  # a tenth of the time of values.any(); NaN also differs from 0
    return values[:0] if smallest == 0 == largest else values + 0


@dataclasses.dataclass(eq=False)
class Sparse(IndexedValues):
    """Sends the index and the value of each stored element.

    Attributes:
        numel: elements of the dense tensor.
        indices: integer [z], strictly ascending, below `numel`; stored as int64.
        values: floating [z], in the type that is sent; -0.0 becomes +0.0, and if all are zero, none is stored.

    Raises:
        PayloadError: `indices` and `values` are not 1-D and equally long.
    """

    code = 2
    addable = True

    numel: int
    indices: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.indices.dim() != 1 or self.indices.shape != self.values.shape:
            raise PayloadError(
                f"indices {list(self.indices.shape)} and values {list(self.values.shape)} must be 1-D and equally long"
            )
        self.values = canonical_values(self.values)
        self.indices = self.indices[: self.values.numel()].to(torch.int64)

    @staticmethod
    def packed_nbytes(numel: int, num_entries: int, dtype: torch.dtype) -> int:
        """Return the length of a packed payload with this many entries, not all of them zero."""
        sparse = num_entries * dtype.itemsize + index_set_nbytes(num_entries, numel)
        return HEADER_BYTES + min(sparse, numel * dtype.itemsize)

    @property
    @override
    def positions(self) -> torch.Tensor:
        return self.indices

    @property
    @override
    def nbytes(self) -> int:
        return self.packed_nbytes(self.numel, self.num_entries, self.values.dtype)

    @property
    def is_wide(self) -> bool:
        """Return True if the dense form takes no more bytes."""
        return self.num_entries > 0 and self.nbytes == HEADER_BYTES + self.numel * self.values.element_size()

    def widened(self) -> Dense:
        """Return the same tensor as `Dense`, in the same value type."""
        dense = self.values.new_zeros(self.numel)
        dense[self.indices] = self.values
        return Dense(dense)

    @override
    def fields(self) -> list[Field]:
        if self.is_wide:
            dense = self.widened()
            dense.tensor_id = self.tensor_id
            return dense.fields()
        coding = cheapest_coding(self.num_entries, self.numel)
        header = self._header(self.values.dtype, num_entries=self.num_entries, flags=CODINGS.index(coding))
        fields = encode_indices(self.indices, self.numel, coding)
        if _indices_first(self.num_entries, self.numel, coding, self.values.dtype):
            return [header, *fields, self.values]
        return [header, self.values, *fields]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Sparse:
        dtype, count = cls._dtype_in(header), header.num_entries
        if header.flags >= len(CODINGS):
            raise PayloadError(f"no index coding has the number {header.flags}")
        coding = CODINGS[header.flags]
        reader = Reader(body)
        if _indices_first(count, header.numel, coding, dtype):
            indices = decode_indices(reader, count, header.numel, coding)
            return cls(header.numel, indices, reader.tensor(count, dtype))
        values = reader.tensor(count, dtype)
        return cls(header.numel, decode_indices(reader, count, header.numel, coding), values)

    @override
    def slice(self, start: int, stop: int) -> Sparse:
        self._check_borders(start, stop)
        first, last = torch.searchsorted(self.indices, torch.tensor([start, stop], device=self.device)).tolist()
        return Sparse(stop - start, self.indices[first:last] - start, self.values[first:last])

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """Return the sum at the union of the positions, also where values cancel; as `Dense` if that is no longer.

        Raises:
            PayloadError: the two do not fit together.
        """
        self._check_fits(other)
        if isinstance(other, Dense):
            return other.add(self, keep_lost)
        if not isinstance(other, IndexedValues):
            raise PayloadError(f"Sparse and {type(other).__name__} payloads cannot be added without decoding them")
        keep = None if keep_lost is None else lambda indices, lost: keep_lost(0, lost, indices)
        total = Sparse(self.numel, *add_index_sets(self.indices, self.values, other.positions, other.values, keep))
        return total.widened() if total.is_wide else total


def as_sparse(payload: IndexedValues) -> Sparse:
    """Return the payload as `Sparse`; shares its memory."""
    return Sparse(payload.numel, payload.positions, payload.values)


def _indices_first(count: int, numel: int, coding: str, dtype: torch.dtype) -> bool:
    """Return True if indices precede values: the wider type comes first, so that both can be read in place."""
    return coding == "coo" and coding_nbytes("coo", count, numel) > count * dtype.itemsize


FIXED = struct.Struct("<Q")
MAX_SEED = 2**64 - 1


@dataclasses.dataclass(eq=False)
class Seeded(IndexedValues):
    """Sends values at random positions that every rank computes from one seed, `seeded_positions(numel, z, seed)`.

    Attributes:
        numel: elements of the dense tensor.
        seed: 0..2^64 - 1, equal on all ranks of a sum.
        values: floating [z], in the type that is sent, in order of their positions.

    Raises:
        PayloadError: more values than elements, or a seed that does not fit.
    """

    code = 5
    elementwise = True
    addable = True

    numel: int
    seed: int
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.numel() > self.numel:
            raise PayloadError(f"values {list(self.values.shape)} do not fit {self.numel} elements")
        check_numel(self.numel)
        if not 0 <= self.seed <= MAX_SEED:
            raise PayloadError(f"a seed lies in 0..2^64 - 1, got {self.seed}")

    @staticmethod
    def packed_nbytes(num_entries: int, dtype: torch.dtype) -> int:
        """Return the length of a packed payload with this many entries."""
        return HEADER_BYTES + FIXED.size + num_entries * dtype.itemsize

    @staticmethod
    def room(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return uninitialised values, `dtype` [count], that `pack` need not copy."""
        return with_room(HEADER_BYTES + FIXED.size, count, dtype, device)

    @functools.cached_property
    @override
    def positions(self) -> torch.Tensor:
        return seeded_positions(self.numel, self.num_entries, self.seed).to(self.device)

    @override
    def fields(self) -> list[Field]:
        return [self._header(self.values.dtype, num_entries=self.num_entries) + FIXED.pack(self.seed), self.values]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        if header.flags:
            raise PayloadError("a seeded payload has no flags")
        reader = Reader(body)
        (seed,) = map(int, reader.fields(FIXED))
        return cls(header.numel, seed, reader.tensor(header.num_entries, cls._dtype_in(header)))

    def slice(self, start: int, stop: int) -> Payload:
        """Return a part, as `Sparse` because its positions do not follow from the seed; the whole range is `self`."""
        return self if (start, stop) == (0, self.numel) else as_sparse(self).slice(start, stop)

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """Return the sum: `Seeded` if both have the same positions, else `Sparse` at the union of the positions.

        Raises:
            PayloadError: the two do not fit together.
        """
        self._check_fits(other)
        if isinstance(other, Seeded) and (other.seed, other.num_entries) == (self.seed, self.num_entries):
            total = add_values(self.values, other.values)
            if keep_lost is not None and total.dtype in SHORT:
                keep_lost(0, lost_in_sum(self.values, other.values, total), self.positions)
            return self.with_wire(total)
        return as_sparse(self).add(other, keep_lost)

    def knowing(self, positions: torch.Tensor) -> Self:
        """Return self after storing its positions, which are then not computed from the seed."""
        self.__dict__["positions"] = positions
        return self

    def with_wire(self, wire: torch.Tensor) -> Seeded:
        """Return other values at the same positions, which are not computed again."""
        payload = Seeded(self.numel, self.seed, wire)
        if "positions" in self.__dict__ and wire.device == self.device:
            payload.__dict__["positions"] = self.positions
        return payload
