"""SparseCodes: a payload with values of 2 or 8 bits at ascending positions, zero elsewhere.

Body: group_size u32 | k u32 | shared numbers | codes | indices. The header's flags say how values
(`codec/value_codes.py`) and indices are coded. Indices take the shortest of three forms: local indices as in
`GroupSparse`, a bitmap, or Elias-Fano, which codes the gaps between the high parts in unary (`codec/index_sets.py`).
If all values are zero, only header and fixed fields are sent.

Bytes: with z values of b bits out of m elements,
24 + shared numbers + ceil(z b / 8) + min(ceil(z ceil(log2 min(group_size, m)) / 8), ceil(m / 8), Elias-Fano),
where Elias-Fano takes ceil(z l / 8) + ceil((z + floor((m - 1) / 2^l)) / 8) with l = floor(log2(m / z)). The shared
numbers take 4 bytes per block of values, or 16 in total with "sigma".
"""

import dataclasses
import functools
import struct
from typing import Literal, Self

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Payload, PayloadError, Received
from collectives.payloads.codec.bits import bits_for, pack_bits, packed_nbytes
from collectives.payloads.codec.index_sets import coding_nbytes, decode_indices, encode_indices
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
from collectives.payloads.fields import Field
from collectives.payloads.group_sparse import check_entries, unpack_groups
from collectives.payloads.sparse import IndexedValues, Sparse

IndexForm = Literal["local", "bitmap", "elias_fano"]
INDEX_FORMS: tuple[IndexForm, ...] = ("local", "bitmap", "elias_fano")


@dataclasses.dataclass(eq=False)
class SparseCodes(IndexedValues):
    """A payload that sends positions, and for each a code of 2 or 8 bits and few numbers that blocks of codes share.

    A slice is `Sparse` and a sum `Sparse` or `Dense`: with "two_magnitudes" in bf16, in which the magnitudes are exact,
    otherwise in fp32.

    Attributes:
        numel: number of elements of the dense tensor.
        group_size: number of elements per group; `numel` if there are no groups.
        k: number of entries per group, 1..group_size; the last group may have fewer.
        indices: positions in the dense tensor, int64 [z], strictly ascending, k in each group; none are stored if all
            shared numbers are zero.
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
        """Return the bytes of a packed payload with this many entries, not all of them zero."""
        indices = _form_nbytes(_shortest_form(num_entries, numel, group_size), num_entries, numel, group_size)
        return HEADER_BYTES + cls.fixed.size + coded_nbytes(coding, num_entries, numel) + indices

    @functools.cached_property
    def values(self) -> torch.Tensor:  # type: ignore[override]  # computed on first use
        """Return the decoded values, fp32 [z]."""
        block = block_length(self.coding, self.num_entries, self.numel)
        return decode_values(self.coding, self.tables, self.packed, self.num_entries, block)

    def holding(self, values: torch.Tensor) -> Self:
        """Store the decoded `values`, fp32 [z], so that they need not be computed; return the payload itself."""
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
        # a part is `Sparse`, because blocks of values do not end at its borders
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
