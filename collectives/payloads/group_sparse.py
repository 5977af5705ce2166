"""GroupSparse, RowSparse and SparseCodes: k entries in every group, whole rows, or values of 2 or 8 bits.

GroupSparse body: group_size u32 | k u32 | values | local indices, ceil(log2 group_size) bits each, low bits first. If a
bitmap of all elements is shorter than the local indices, it takes their place (flag 1 in the header). The last group
may be shorter, with its own k, which follows from the number of entries. RowSparse body: row_numel u32 | 4 zero bytes |
values of the rows | row numbers, coded as the header's flags say (`codec/index_sets.py`). If all values are zero, only
the header and the fixed fields are sent.

Bytes: with z values of v bytes each, out of m elements, GroupSparse has
24 + z v + min(ceil(z ceil(log2 min(group_size, m)) / 8), ceil(m / 8)).
RowSparse has 24 + rows * row_numel * v + row indices (at most ceil(num_rows / 8)).

SparseCodes body: group_size u32 | k u32 | shared numbers | codes | indices. The header's flags say how values
(`codec/value_codes.py`) and indices are coded. Indices take the shortest of three forms: local indices as in
`GroupSparse`, a bitmap, or Elias-Fano, which codes the gaps between the high parts in unary (`codec/index_sets.py`).

SparseCodes bytes: with z values of b bits out of m elements,
24 + shared numbers + ceil(z b / 8) + min(ceil(z ceil(log2 min(group_size, m)) / 8), ceil(m / 8), Elias-Fano),
where Elias-Fano takes ceil(z l / 8) + ceil((z + floor((m - 1) / 2^l)) / 8) with l = floor(log2(m / z)). The shared
numbers take 4 bytes per block of values; with "sigma", 16 bytes in total.
"""

import dataclasses
import functools
import struct
from typing import Literal, Self

import torch
from typing_extensions import override

from collectives.kernels.loop import ByteArray, Int, IntArray, LongArray, Loop
from collectives.payloads.base import HEADER_BYTES, Dense, KeepLost, Payload, PayloadError, Received
from collectives.payloads.codec.bits import bits_for, pack_bits, packed_nbytes, unpack_bits
from collectives.payloads.codec.index_sets import (
    CODINGS,
    add_at,
    add_index_sets,
    bitmap_of,
    cheapest_coding,
    check_ascending,
    coding_nbytes,
    decode_indices,
    encode_indices,
    index_set_nbytes,
    positions_in,
)
from collectives.payloads.codec.value_codes import (
    VALUE_CODINGS,
    ValueCoding,
    bits_of_code,
    block_length,
    coded_nbytes,
    decode_values,
    table_dtype,
    table_length,
)
from collectives.payloads.codec.values import divided
from collectives.payloads.fields import Field
from collectives.payloads.sparse import IndexedValues, Sparse, canonical_values

LOCAL, BITMAP = 0, 1  # forms of GroupSparse

_UNPACK_GROUPS = Loop("unpack_groups", ByteArray, Int, Int, Int, Int, Int, IntArray, LongArray, returns=Int)
_ADD_GROUP_STARTS = Loop("add_group_starts", LongArray, Int, Int, Int, returns=Int)


@dataclasses.dataclass(eq=False)
class GroupSparse(IndexedValues):
    """A payload that sends k values per group of `group_size` consecutive elements.

    The last group may have fewer elements, and so fewer values. A sum of such payloads is `Sparse` or `Dense`, because
    the groups of a sum can have different numbers of entries.

    Attributes:
        numel: number of elements of the dense tensor.
        group_size: number of elements per group.
        k: number of entries per group, 1..group_size.
        values: floating [z] with z = (num_groups - 1) * k + last_k, group after group. -0.0 becomes +0.0. If all values
            are zero, no value is stored.
        indices: index of each value within its group, integer [z], ascending within each group.

    Raises:
        PayloadError: `k` is out of range, or `values` and `indices` do not have z elements.
    """

    code = 3
    fixed = struct.Struct("<II")
    num_forms = 2
    splits_blocks = True

    numel: int
    group_size: int
    k: int
    values: torch.Tensor
    indices: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 1 or self.values.shape != self.indices.shape:
            raise PayloadError(
                f"values {list(self.values.shape)} and indices {list(self.indices.shape)} must be 1-D and equally long"
            )
        count = self.values.numel()
        check_entries(self.numel, self.group_size, self.k, count)
        self.values = canonical_values(self.values)
        self.alignment = self.group_size
        self.nbytes = self.packed_nbytes(self.numel, self.group_size, self.num_entries, self.values.dtype)
        if self.num_entries < count:
            self.indices = self.indices[: self.num_entries]

    @classmethod
    def packed_nbytes(cls, numel: int, group_size: int, num_entries: int, dtype: torch.dtype) -> int:
        """Return the bytes of a packed payload with this many entries, at least one of which is not zero."""
        indices = min(packed_nbytes(num_entries, bits_for(min(group_size, numel))), packed_nbytes(numel, 1))
        return HEADER_BYTES + cls.fixed.size + num_entries * dtype.itemsize + indices

    @functools.cached_property
    @override
    def positions(self) -> torch.Tensor:
        return _positions(self.indices, self.group_size, self.k)

    @override
    def fields(self) -> list[Field]:
        bits = bits_for(min(self.group_size, self.numel))
        form = BITMAP if bits * self.num_entries > 8 * packed_nbytes(self.numel, 1) else LOCAL
        header = self._header(self.values.dtype, self.group_size, self.k, form=form)
        indices = bitmap_of(self.positions, self.numel) if form == BITMAP else pack_bits(self.indices, bits)
        return [header, self.values, indices]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        (group_size, k), count, numel = wire.numbers, wire.num_entries, wire.numel
        if not 1 <= k <= group_size:
            raise PayloadError(f"k = {k} does not fit groups of {group_size}")
        values = wire.body.tensor(count, wire.dtype)
        if wire.form == LOCAL:
            bits = bits_for(min(group_size, numel))
            packed = wire.body.tensor(packed_nbytes(count, bits), torch.uint8)
            indices, positions = unpack_groups(packed, count, bits, group_size, k, numel)
        else:
            indices = positions_in(wire.body.tensor(packed_nbytes(numel, 1), torch.uint8), numel, count)
            indices -= _group_starts(count, group_size, k, indices.device)
            positions = _positions(indices, group_size, k)
        return cls(numel, group_size, k, values, indices).knowing(positions)

    def _cut(self, start: int, stop: int) -> IndexedValues:
        # `Sparse` if a border lies inside a group, because then some group does not have `k` entries
        if any(border % self.group_size and border != self.numel for border in (start, stop)):
            begin, end = self.entries_before([start, stop])
            return Sparse(stop - start, self.positions[begin:end] - start, self.values[begin:end])
        first, last = (-(-border // self.group_size) * self.k for border in (start, stop))
        entries = slice(
            min(first, self.num_entries), self.num_entries if stop == self.numel else min(last, self.num_entries)
        )
        return GroupSparse(stop - start, self.group_size, self.k, self.values[entries], self.indices[entries])


def check_entries(numel: int, group_size: int, k: int, count: int) -> None:
    """Raise PayloadError unless there are no entries, or k entries in each whole group and 1..k in the last group."""
    if not 1 <= k <= group_size:
        raise PayloadError(f"k must lie in 1..{group_size} (the group size), got {k}")
    num_groups = -(-numel // group_size)
    most = min(k, numel - (num_groups - 1) * group_size)
    if count and not 1 <= count - (num_groups - 1) * k <= most:
        raise PayloadError(
            f"{count} entries do not fill {num_groups} groups with {k} each (the last one with 1..{most})"
        )


def unpack_groups(
    packed: torch.Tensor, count: int, bits: int, group_size: int, k: int, numel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the index of each entry within its group, integer [count], and in the flat tensor, int64 [count].

    Args:
        packed: the packed indices, uint8 [ceil(count * bits / 8)].
        count: number of entries.
        bits: bits per index.
        group_size: number of elements per group.
        k: number of entries per group.
        numel: number of elements of the flat tensor.

    Raises:
        PayloadError: an index lies outside its group or `numel`, or the positions do not ascend.
    """
    if _UNPACK_GROUPS.serves(packed) and bits < 32:
        indices, positions = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int64)
        if _UNPACK_GROUPS(packed, count, bits, group_size, k, numel, indices, positions):
            return indices, positions
    indices = unpack_bits(packed, count, bits)
    positions = _positions(indices, group_size, k)
    check_ascending(positions, numel)
    return indices, positions


def _positions(indices: torch.Tensor, group_size: int, k: int) -> torch.Tensor:
    """Return the position of each entry in the flat tensor, int64 [count], given its index within its group.

    Raises:
        PayloadError: an index lies outside its group.
    """
    if _ADD_GROUP_STARTS.serves(indices):
        positions = indices.to(torch.int64, copy=True)
        is_inside = _ADD_GROUP_STARTS(positions, len(positions), group_size, k)
    else:
        positions = indices + _group_starts(len(indices), group_size, k, indices.device)
        is_inside = ((indices >= 0) & (indices < group_size)).all()
    if not is_inside:
        raise PayloadError(f"an index lies outside its group of {group_size}")
    return positions


def _group_starts(count: int, group_size: int, k: int, device: torch.device) -> torch.Tensor:
    starts = torch.arange(-(-count // k), device=device) * group_size
    return starts[:, None].expand(-1, k).reshape(-1)[:count]


@dataclasses.dataclass(eq=False)
class RowSparse(Payload):
    """A payload that sends some rows of a matrix [num_rows, row_numel] (embedding rows, filters of a convolution).

    Attributes:
        numel: number of elements of the matrix, a multiple of row_numel.
        rows: numbers of the rows that are sent, integer [kept], strictly ascending; stored as int64.
        values: the rows, floating [kept, row_numel], in the dtype that is sent. -0.0 becomes +0.0. If all values are
            zero, no row is stored.
        row_numel: number of elements per row.

    Raises:
        PayloadError: `rows` and `values` do not have these shapes, or `numel` is no multiple of row_numel.
    """

    code = 4
    fixed = struct.Struct("<I4x")
    num_forms = len(CODINGS)
    addable = True

    numel: int
    rows: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.rows.shape != self.values.shape[:1] or self.values.shape[1] == 0:
            raise PayloadError(
                f"rows {list(self.rows.shape)} and values {list(self.values.shape)} must be [kept] and [kept, width]"
            )
        self.row_numel = self.alignment = self.values.shape[1]
        if self.numel % self.row_numel:
            raise PayloadError(f"{self.numel} elements are not whole rows of {self.row_numel}")
        self.values = canonical_values(self.values)
        self.rows = self.rows[: self.values.shape[0]].to(torch.int64)
        self.nbytes = self.packed_nbytes(self.numel, self.row_numel, self.rows.numel(), self.values.dtype)

    @classmethod
    def packed_nbytes(cls, numel: int, row_numel: int, num_kept: int, dtype: torch.dtype) -> int:
        """Return the bytes of a packed payload with this many rows, at least one of which is not zero."""
        values = num_kept * row_numel * dtype.itemsize
        return HEADER_BYTES + cls.fixed.size + values + index_set_nbytes(num_kept, numel // row_numel)

    @override
    def fields(self) -> list[Field]:
        num_rows = self.numel // self.row_numel
        coding = cheapest_coding(self.rows.numel(), num_rows)
        header = self._header(self.values.dtype, self.row_numel, form=CODINGS.index(coding))
        return [header, self.values, *encode_indices(self.rows, num_rows, coding)]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        (row_numel,) = wire.numbers
        if row_numel == 0 or wire.numel % row_numel or wire.num_entries % row_numel:
            raise PayloadError(f"{wire.num_entries} entries of {wire.numel} are not whole rows of {row_numel}")
        num_kept = wire.num_entries // row_numel
        values = wire.body.tensor(wire.num_entries, wire.dtype).view(num_kept, row_numel)
        return cls(wire.numel, decode_indices(wire.body, num_kept, wire.numel // row_numel, CODINGS[wire.form]), values)

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        dense.view(-1, self.row_numel).index_add_(0, self.rows, divided(self.values, divisor, dense.dtype))

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        dense.view(-1, self.row_numel).index_fill_(0, self.rows, 0)

    @override
    def _cut(self, start: int, stop: int) -> Payload:
        limits = torch.tensor([start // self.row_numel, stop // self.row_numel], device=self.device)
        first, last = torch.searchsorted(self.rows, limits).tolist()
        return RowSparse(stop - start, self.rows[first:last] - start // self.row_numel, self.values[first:last])

    def _add(self, other: Payload, keep_lost: KeepLost | None) -> Payload:
        # the sum has the union of the rows; it is `Dense` if that takes no more bytes
        keep = keep_lost and functools.partial(self._keep_rows, keep_lost)
        if isinstance(other, Dense):
            return Dense(add_at(other.values.view(-1, self.row_numel), self.rows, self.values, keep).view(-1))
        if not isinstance(other, RowSparse) or other.row_numel != self.row_numel:
            raise PayloadError("row-sparse payloads can only be added to others with the same row length")
        total = RowSparse(self.numel, *add_index_sets(self.rows, self.values, other.rows, other.values, keep))
        if total.nbytes < HEADER_BYTES + self.numel * total.values.element_size():
            return total
        dense = total.values.new_zeros(self.numel)
        dense.view(-1, self.row_numel)[total.rows] = total.values
        return Dense(dense)

    def _keep_rows(self, keep_lost: KeepLost, start: int, lost: torch.Tensor, rows: torch.Tensor) -> None:
        # `lost`: the rounding errors of these rows, fp32 [rows, row_numel]
        positions = rows[:, None] * self.row_numel + torch.arange(self.row_numel, device=rows.device)
        keep_lost(start, lost.view(-1), positions.view(-1))


IndexForm = Literal["local", "bitmap", "elias_fano"]
INDEX_FORMS: tuple[IndexForm, ...] = ("local", "bitmap", "elias_fano")


@dataclasses.dataclass(eq=False)
class SparseCodes(IndexedValues):
    """A payload that sends positions, a code of 2 or 8 bits for each, and a few numbers that blocks of codes share.

    A slice is `Sparse`, and a sum is `Sparse` or `Dense`: with "two_magnitudes" in bf16, because magnitudes are exact
    in bf16; otherwise in fp32.

    Attributes:
        numel: number of elements of the dense tensor.
        group_size: number of elements per group; `numel` if there are no groups.
        k: number of entries per group, 1..group_size; the last group may have fewer.
        indices: positions in the dense tensor, int64 [z], strictly ascending, k in each group. If all shared numbers
            are zero, no position is stored.
        coding: how the values are coded.
        tables: the numbers that blocks of values share, bf16 or fp32 (`codec/value_codes.py`).
        packed: the codes, uint8 [ceil(z * bits / 8)], low bits first.

    Raises:
        PayloadError: `k` is out of range, or the tensors do not fit each other.
    """

    code = 12
    fixed = struct.Struct("<II")
    num_forms = len(INDEX_FORMS) * len(VALUE_CODINGS)
    dtypes = (torch.float32, torch.bfloat16)

    numel: int
    group_size: int
    k: int
    indices: torch.Tensor
    coding: ValueCoding
    tables: torch.Tensor
    packed: torch.Tensor

    def __post_init__(self) -> None:
        count = self.indices.numel()
        check_entries(self.numel, self.group_size, self.k, count)
        wanted = table_length(self.coding, count, self.numel), packed_nbytes(count, bits_of_code(self.coding))
        if (self.tables.numel(), self.packed.numel()) != wanted or self.tables.dtype != table_dtype(self.coding):
            raise PayloadError(
                f"{count} values as {self.coding} need {wanted[0]} shared numbers and {wanted[1]} bytes of codes, "
                f"got {self.tables.numel()} of {self.tables.dtype} and {self.packed.numel()}"
            )
        if not self.tables.any():
            self.indices, self.tables, self.packed = self.indices[:0], self.tables[:0], self.packed[:0]
        self.device = self.packed.device
        self.num_entries = self.indices.numel()
        self.nbytes = self.packed_nbytes(self.numel, self.group_size, self.num_entries, self.coding)

    @classmethod
    def packed_nbytes(cls, numel: int, group_size: int, num_entries: int, coding: ValueCoding) -> int:
        """Return the bytes of a packed payload with this many entries, at least one of which is not zero."""
        indices = _form_nbytes(_shortest_form(num_entries, numel, group_size), num_entries, numel, group_size)
        return HEADER_BYTES + cls.fixed.size + coded_nbytes(coding, num_entries, numel) + indices

    @functools.cached_property
    def values(self) -> torch.Tensor:  # type: ignore[override]  # computed on first use
        """Return the decoded values, fp32 [z]."""
        block = block_length(self.coding, self.num_entries, self.numel)
        return decode_values(self.coding, self.tables, self.packed, self.num_entries, block)

    def holding(self, values: torch.Tensor) -> Self:
        """Store `values`, the decoded values, fp32 [z], so that they are not computed again; return this payload."""
        self.__dict__["values"] = values[: self.num_entries]
        return self

    @override
    def fields(self) -> list[Field]:
        index_form = _shortest_form(self.num_entries, self.numel, self.group_size)
        form = INDEX_FORMS.index(index_form) + len(INDEX_FORMS) * VALUE_CODINGS.index(self.coding)
        header = self._header(table_dtype(self.coding), self.group_size, self.k, form=form)
        if index_form != "local":
            return [header, self.tables, self.packed, *encode_indices(self.indices, self.numel, index_form)]
        local = self.indices if self.group_size >= self.numel else self.indices.remainder(self.group_size)
        return [header, self.tables, self.packed, pack_bits(local, bits_for(min(self.group_size, self.numel)))]

    @override
    @classmethod
    def from_wire(cls, wire: Received) -> Self:
        (group_size, k), count, numel = wire.numbers, wire.num_entries, wire.numel
        value_number, index_number = divmod(wire.form, len(INDEX_FORMS))
        coding, index_form = VALUE_CODINGS[value_number], INDEX_FORMS[index_number]
        if wire.dtype != table_dtype(coding) or index_form != _shortest_form(count, numel, group_size):
            raise PayloadError(f"{count} values as {coding} have shared numbers of another type, or shorter indices")
        check_entries(numel, group_size, k, count)
        tables = wire.body.tensor(table_length(coding, count, numel), wire.dtype)
        packed = wire.body.tensor(packed_nbytes(count, bits_of_code(coding)), torch.uint8)
        if index_form == "local":
            bits = bits_for(min(group_size, numel))
            local = wire.body.tensor(packed_nbytes(count, bits), torch.uint8)
            _, indices = unpack_groups(local, count, bits, group_size, k, numel)
        else:
            indices = decode_indices(wire.body, count, numel, index_form)
        return cls(numel, group_size, k, indices, coding, tables, packed)

    def _cut(self, start: int, stop: int) -> Payload:
        # a part is `Sparse`, because the part may begin or end inside a block of values
        if (start, stop) == (0, self.numel):
            return self
        return self.as_sparse().slice(start, stop)

    @override
    def as_sparse(self) -> Sparse:
        return Sparse(self.numel, self.indices, self.values.to(table_dtype(self.coding)))


def _form_nbytes(form: IndexForm, count: int, numel: int, group_size: int) -> int:
    if form == "local":
        return packed_nbytes(count, bits_for(min(group_size, numel)))
    return coding_nbytes(form, count, numel)


@functools.lru_cache(maxsize=4096)
def _shortest_form(count: int, numel: int, group_size: int) -> IndexForm:
    return min(INDEX_FORMS, key=lambda form: _form_nbytes(form, count, numel, group_size))
