"""Sparse, SparseLevels and Seeded: payloads that send values at ascending positions; all other elements are zero.

Sparse body: values and indices, the wider type first; the header's flags say how the indices are coded
(`codec/index_sets.py`). If `Dense` takes no more bytes, the payload is sent as `Dense`. If all values are zero, only
the header is sent. SparseLevels body: low f32 | ratio f32 | indices | codes of four bits, low bits first: j for the
magnitude low * ratio^j, plus 8 if the value is negative. Seeded body: seed u64 | values; the positions follow from the
seed.

Bytes: Sparse 16 + min over codings (z v + indices), at most 16 + m v. SparseLevels 24 + min over codings (indices) +
ceil(z / 2). Seeded 24 + z v.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import struct
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from typing_extensions import override

from collectives.kernels.loop import ByteArray, Double, Float, FloatArray, Int, LongArray, Loop, array
from collectives.payloads.base import HEADER_BYTES, Dense, KeepLost, Payload, PayloadError, Received
from collectives.payloads.codec.bits import pack_bits, packed_nbytes, unpack_bits
from collectives.payloads.codec.index_sets import (
    CODINGS,
    add_at,
    add_index_sets,
    cheapest_coding,
    coding_nbytes,
    decode_indices,
    encode_indices,
    index_set_nbytes,
    write_sum_,
)
from collectives.payloads.codec.philox import check_numel, seeded_positions
from collectives.payloads.codec.values import SHORT, add_values, divided, lost_in_sum
from collectives.payloads.fields import Field

_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_ADD_AT = {
    dtype: Loop(name, array(dtype), LongArray, Int, Float, FloatArray, Int, returns=Int)
    for dtype, name in zip(_TYPES, ("add_fp32_at", "add_fp16_at", "add_bf16_at"), strict=True)
}
_SURVEY = {
    dtype: Loop(name, array(dtype), Int, returns=Int)
    for dtype, name in zip(_TYPES, ("survey_fp32", "survey_halves", "survey_halves"), strict=True)
}
ANY, MINUS_ZERO = 1, 2
_TAKE = Loop("take_levels", ByteArray, Int, Double, Double, FloatArray)


class IndexedValues(Payload):
    """A payload with values, floating [num_entries], at strictly ascending positions; all other elements are zero."""

    addable = True
    indices: torch.Tensor

    @property
    def positions(self) -> torch.Tensor:
        """Return the index of each value in the flat dense tensor, int64 [num_entries], strictly ascending.

        By default these are the `indices` that the payload sends.
        """
        return self.indices

    def knowing(self, positions: torch.Tensor) -> Self:
        """Store `positions`, the indices of the values, so that they are not computed again; return this payload.

        Args:
            positions: int64, strictly ascending; elements after the first `num_entries` are ignored.
        """
        self.__dict__["positions"] = positions if len(positions) == self.num_entries else positions[: self.num_entries]
        return self

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        positions, values = self.positions, self.values
        loop = _ADD_AT.get(values.dtype)
        if loop is None or dense.dtype != torch.float32 or not (dense.is_contiguous() and loop.serves(dense, values)):
            dense.scatter_add_(0, positions, divided(values, divisor, dense.dtype))
        elif not loop(values.contiguous(), positions.contiguous(), values.numel(), divisor, dense, dense.numel()):
            raise IndexError(f"a position lies outside the {dense.numel()} elements")

    @override
    def write_to(self, parts: Sequence[torch.Tensor], *, divisor: float, others: Sequence[Payload] = ()) -> bool:
        terms = [self, *(other for other in others if isinstance(other, IndexedValues))]
        if len(terms) < 1 + len(others):
            return False
        return write_sum_([t.values for t in terms], [t.positions for t in terms], parts, divisor=divisor)

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        dense.index_fill_(0, self.positions, 0)

    @override
    def clear_selected_in_(self, dense: torch.Tensor) -> None:
        sent = self.positions if self.values.all() else self.positions[self.values != 0]
        dense.index_fill_(0, sent, 0)

    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        # the sum has the union of the positions, even where values cancel; it is `Dense` if that takes no more bytes
        if isinstance(other, Dense):
            mine = self.as_sparse()
            return Dense(add_at(other.values, mine.indices, mine.values, keep_lost))
        if not isinstance(other, IndexedValues):
            raise PayloadError(
                f"{type(self).__name__} and {type(other).__name__} payloads cannot be added without decoding them"
            )
        mine, theirs = self.as_sparse(), other.as_sparse()
        total = Sparse(self.numel, *add_index_sets(mine.indices, mine.values, theirs.indices, theirs.values, keep_lost))
        return total._widened() if total.is_wide else total

    def as_sparse(self) -> Sparse:
        """Return the same entries as `Sparse`, in the dtype of sums; may share memory with this payload."""
        return Sparse(self.numel, self.positions, self.values)

    @override
    def _entries_in(self, numels: Sequence[int]) -> list[int]:
        before = self.entries_before([*itertools.accumulate(numels, initial=0)])
        return [stop - start for start, stop in itertools.pairwise(before)]

    def entries_before(self, borders: list[int]) -> list[int]:
        """Return, for each border, the number of values at positions below it."""
        if self.positions.is_cpu:  # numpy is faster for a few numbers
            return list(np.searchsorted(self.positions.numpy(), borders).tolist())
        return torch.searchsorted(self.positions, torch.tensor(borders, device=self.device)).tolist()


def canonical_values(values: torch.Tensor) -> torch.Tensor:
    """Return the values with -0.0 replaced by +0.0 (copied only if needed), or an empty tensor if all are zero.

    This makes sparse sums equal dense sums: a dense sum gives 0 + -0.0 = +0.0, but merging two sparse payloads would
    copy a -0.0 that only one of them has.
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
    """A payload that sends the index and the value of each stored element.

    Attributes:
        numel: number of elements of the dense tensor.
        indices: integer [z], strictly ascending, below `numel`; stored as int64.
        values: floating [z], in the dtype that is sent. -0.0 becomes +0.0. If all values are zero, no value is stored.

    Raises:
        PayloadError: `indices` and `values` are not 1-D and equally long.
    """

    code = 2
    num_forms = len(CODINGS)

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
        self.nbytes = self.packed_nbytes(self.numel, self.num_entries, self.values.dtype)

    @staticmethod
    def packed_nbytes(numel: int, num_entries: int, dtype: torch.dtype) -> int:
        """Return the bytes of a packed payload with this many entries, at least one of which is not zero."""
        sparse = num_entries * dtype.itemsize + index_set_nbytes(num_entries, numel)
        return HEADER_BYTES + min(sparse, numel * dtype.itemsize)

    @override
    def as_sparse(self) -> Sparse:
        return self

    @property
    def is_wide(self) -> bool:
        """Return True if `Dense` would take no more bytes than this payload."""
        return self.num_entries > 0 and self.nbytes == HEADER_BYTES + self.numel * self.values.element_size()

    def _widened(self) -> Dense:
        dense = self.values.new_zeros(self.numel)
        dense[self.indices] = self.values
        return Dense(dense)

    @override
    def fields(self) -> list[Field]:
        if self.is_wide:
            dense = self._widened()
            dense.tensor_id = self.tensor_id
            return dense.fields()
        coding = cheapest_coding(self.num_entries, self.numel)
        header = self._header(self.values.dtype, form=CODINGS.index(coding))
        indices = encode_indices(self.indices, self.numel, coding)
        if _indices_first(self.num_entries, self.numel, coding, self.values.dtype):
            return [header, *indices, self.values]
        return [header, self.values, *indices]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Sparse:
        count, coding = wire.num_entries, CODINGS[wire.form]
        if _indices_first(count, wire.numel, coding, wire.dtype):
            indices = decode_indices(wire.body, count, wire.numel, coding)
            return cls(wire.numel, indices, wire.body.tensor(count, wire.dtype))
        values = wire.body.tensor(count, wire.dtype)
        return cls(wire.numel, decode_indices(wire.body, count, wire.numel, coding), values)

    @override
    def _cut(self, start: int, stop: int) -> Sparse:
        first, last = self.entries_before([start, stop])
        return Sparse(stop - start, self.indices[first:last] - start, self.values[first:last])


def _indices_first(count: int, numel: int, coding: str, dtype: torch.dtype) -> bool:
    # the wider type comes first, so that both can be read without a copy
    return coding == "coo" and coding_nbytes("coo", count, numel) > count * dtype.itemsize


BITS = 4
NUM_LEVELS = NEGATIVE = 8
LARGEST = torch.finfo(torch.float32).max


@dataclasses.dataclass(eq=False)
class SparseLevels(IndexedValues):
    """A payload that sends indices, and for each a 4-bit code for one of the values +-low * ratio^j, j = 0..7.

    Attributes:
        numel: number of elements of the dense tensor.
        indices: int64 [z], strictly ascending, below `numel`.
        low: the smallest magnitude, above 0, in fp32 precision; 0 if there are no entries.
        ratio: factor from each magnitude to the next, at least 1, in fp32 precision; 0 if there are no entries.
        packed: the codes, uint8 [ceil(z / 2)], low bits first; a code is j, plus 8 if the value is negative.

    Raises:
        PayloadError: `indices` and `packed` do not have these lengths, or `low` or `ratio` is out of range.
    """

    code = 11
    fixed = struct.Struct("<ff")
    num_forms = len(CODINGS)
    dtypes = (torch.float32,)

    numel: int
    indices: torch.Tensor
    low: float
    ratio: float
    packed: torch.Tensor

    def __post_init__(self) -> None:
        self.device = self.packed.device
        self.num_entries = self.indices.numel()
        self.nbytes = self.packed_nbytes(self.numel, self.num_entries)
        if self.indices.dim() != 1 or self.packed.numel() != packed_nbytes(self.num_entries, BITS):
            raise PayloadError(f"{self.packed.numel()} bytes of codes do not fit indices {list(self.indices.shape)}")
        if not self.num_entries:
            self.low = self.ratio = 0.0
        elif not (0 < self.low < math.inf and 1 <= self.ratio < math.inf):
            raise PayloadError(f"levels need low > 0 and ratio >= 1, got low={self.low} and ratio={self.ratio}")

    @classmethod
    def packed_nbytes(cls, numel: int, num_entries: int) -> int:
        """Return the bytes of a packed payload with this many entries."""
        return HEADER_BYTES + cls.fixed.size + index_set_nbytes(num_entries, numel) + packed_nbytes(num_entries, BITS)

    @functools.cached_property
    def values(self) -> torch.Tensor:  # type: ignore[override]  # computed on first use
        """Return the decoded values, fp32 [z]."""
        if _TAKE.serves(self.packed):
            values = torch.empty(self.num_entries, dtype=torch.float32)
            _TAKE(self.packed, self.num_entries, self.low, self.ratio, values)
            return values
        magnitudes = levels(self.low, self.ratio)
        both = [*magnitudes, *(-magnitude for magnitude in magnitudes)]
        table = torch.tensor(both, dtype=torch.float32, device=self.device)
        return table.index_select(0, unpack_bits(self.packed, self.num_entries, BITS))

    @override
    def fields(self) -> list[Field]:
        coding = cheapest_coding(self.num_entries, self.numel)
        header = self._header(torch.float32, self.low, self.ratio, form=CODINGS.index(coding))
        return [header, *encode_indices(self.indices, self.numel, coding), self.packed]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        indices = decode_indices(wire.body, wire.num_entries, wire.numel, CODINGS[wire.form])
        packed = wire.body.tensor(packed_nbytes(wire.num_entries, BITS), torch.uint8)
        low, ratio = wire.numbers
        return cls(wire.numel, indices, low, ratio, packed)

    @override
    def _cut(self, start: int, stop: int) -> SparseLevels:
        first, last = self.entries_before([start, stop])
        packed = pack_bits(unpack_bits(self.packed, self.num_entries, BITS)[first:last], BITS)
        return SparseLevels(stop - start, self.indices[first:last] - start, self.low, self.ratio, packed)


def levels(low: float, ratio: float) -> list[float]:
    """Return the eight magnitudes low * ratio^j, j = 0..7, each at most the largest fp32 number.

    Each magnitude is computed from the one before in fp64, so that all machines get the same numbers.
    """
    row = [low]
    while len(row) < NUM_LEVELS:
        row.append(min(row[-1] * ratio, LARGEST))
    return row


@dataclasses.dataclass(eq=False)
class Seeded(IndexedValues):
    """A payload that sends a seed, and values at random positions that follow from the seed.

    Every rank computes the same positions, `seeded_positions(numel, z, seed)`.

    Attributes:
        numel: number of elements of the dense tensor.
        seed: 0..2^64 - 1, equal on all ranks of a sum.
        values: floating [z], in the dtype that is sent, in the order of their positions.

    Raises:
        PayloadError: there are more values than elements, or the seed is out of range.
    """

    code = 5
    fixed = struct.Struct("<Q")
    elementwise = True

    numel: int
    seed: int
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.numel() > self.numel:
            raise PayloadError(f"values {list(self.values.shape)} do not fit {self.numel} elements")
        check_numel(self.numel)
        if not 0 <= self.seed < 2**64:
            raise PayloadError(f"a seed lies in 0..2^64 - 1, got {self.seed}")
        self.numbers = (self.seed,)

    @classmethod
    def packed_nbytes(cls, num_entries: int, dtype: torch.dtype) -> int:
        """Return the bytes of a packed payload with this many entries."""
        return HEADER_BYTES + cls.fixed.size + num_entries * dtype.itemsize

    @functools.cached_property
    @override
    def positions(self) -> torch.Tensor:
        return seeded_positions(self.numel, self.num_entries, self.seed).to(self.device)

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        (seed,) = wire.numbers
        return cls(wire.numel, seed, wire.body.tensor(wire.num_entries, wire.dtype))

    def _cut(self, start: int, stop: int) -> Payload:
        # a part is `Sparse`, because its positions do not follow from the seed
        return self if (start, stop) == (0, self.numel) else self.as_sparse().slice(start, stop)

    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        # the sum is `Seeded` if both have the same positions; otherwise both are added as `Sparse`
        if not (isinstance(other, Seeded) and (other.seed, other.num_entries) == (self.seed, self.num_entries)):
            return self.as_sparse().add(other, keep_lost)
        total = add_values(self.values, other.values)
        if keep_lost is not None and total.dtype in SHORT:
            keep_lost(0, lost_in_sum(self.values, other.values, total), self.positions)
        return self.with_wire(total)

    @override
    def with_wire(self, wire: torch.Tensor) -> Seeded:
        payload = Seeded(self.numel, self.seed, wire)
        if "positions" in self.__dict__ and wire.device == self.device:
            payload.knowing(self.positions)
        return payload
