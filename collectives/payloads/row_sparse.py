"""RowSparse: a payload with whole rows of a matrix (embedding rows, filters of a convolution); other rows are zero.

Body: row_numel u32 | 4 zero bytes | values of the rows | row numbers, coded as the header's flags say
(`codec/index_sets.py`). If all values are zero, only header and fixed fields are sent.

Bytes: 24 + rows * row_numel * v + row indices (at most ceil(num_rows / 8)).
"""

from __future__ import annotations

import dataclasses
import struct
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Header, KeepLost, Payload, TypedValues
from collectives.payloads.codec.index_sets import (
    CODINGS,
    add_index_sets,
    cheapest_coding,
    decode_indices,
    encode_indices,
    index_set_nbytes,
)
from collectives.payloads.codec.values import SHORT, add_values, divided, lost_in_sum
from collectives.payloads.dense import Dense
from collectives.payloads.fields import Field, PayloadError, Reader
from collectives.payloads.sparse import canonical_values

FIXED = struct.Struct("<II")


@dataclasses.dataclass(eq=False)
class RowSparse(TypedValues):
    """Sends some rows of a matrix [num_rows, row_numel].

    Attributes:
        numel: elements of the matrix, a multiple of row_numel.
        rows: integer [kept], strictly ascending row numbers; stored as int64.
        values: floating [kept, row_numel], in the type that is sent; -0.0 becomes +0.0, and if all are zero, no row
            is stored.

    Raises:
        PayloadError: the shapes do not fit together.
    """

    code = 4
    addable = True

    numel: int
    rows: torch.Tensor
    values: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() != 2 or self.rows.shape != self.values.shape[:1] or self.row_numel == 0:
            raise PayloadError(
                f"rows {list(self.rows.shape)} and values {list(self.values.shape)} must be [kept] and [kept, width]"
            )
        if self.numel % self.row_numel:
            raise PayloadError(f"{self.numel} elements are not whole rows of {self.row_numel}")
        self.values = canonical_values(self.values)
        self.rows = self.rows[: self.values.shape[0]].to(torch.int64)

    @staticmethod
    def packed_nbytes(numel: int, row_numel: int, num_kept: int, dtype: torch.dtype) -> int:
        """Return the length of a packed payload with this many rows, not all of them zero."""
        values = num_kept * row_numel * dtype.itemsize
        return HEADER_BYTES + FIXED.size + values + index_set_nbytes(num_kept, numel // row_numel)

    @property
    def row_numel(self) -> int:
        """Return the elements per row."""
        return self.values.shape[1]

    @property
    def num_rows(self) -> int:
        """Return the number of rows of the matrix."""
        return self.numel // self.row_numel

    @property
    @override
    def nbytes(self) -> int:
        return self.packed_nbytes(self.numel, self.row_numel, self.rows.numel(), self.values.dtype)

    @property
    @override
    def alignment(self) -> int:
        return self.row_numel

    @override
    def fields(self) -> list[Field]:
        coding = cheapest_coding(self.rows.numel(), self.num_rows)
        header = self._header(self.values.dtype, num_entries=self.num_entries, flags=CODINGS.index(coding))
        support = encode_indices(self.rows, self.num_rows, coding)
        return [header + FIXED.pack(self.row_numel, 0), self.values, *support]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        dtype = cls._dtype_in(header)
        reader = Reader(body)
        row_numel, reserved = map(int, reader.fields(FIXED))
        if reserved or header.flags >= len(CODINGS):
            raise PayloadError("the fixed fields of a row-sparse payload do not fit together")
        if row_numel == 0 or header.numel % row_numel or header.num_entries % row_numel:
            raise PayloadError(f"{header.num_entries} entries of {header.numel} are not whole rows of {row_numel}")
        num_kept = header.num_entries // row_numel
        values = reader.tensor(header.num_entries, dtype).view(num_kept, row_numel)
        rows = decode_indices(reader, num_kept, header.numel // row_numel, CODINGS[header.flags])
        return cls(header.numel, rows, values)

    @override
    def add_to_(self, dense: torch.Tensor, *, divisor: float = 1.0) -> None:
        self._matrix(dense).index_add_(0, self.rows, divided(self.values, divisor, dense.dtype))

    @override
    def subtract_from_(self, dense: torch.Tensor) -> None:
        self._matrix(dense).index_add_(0, self.rows, self.values.to(dense.dtype), alpha=-1)

    @override
    def clear_in_(self, dense: torch.Tensor) -> None:
        self._matrix(dense).index_fill_(0, self.rows, 0)

    def entries_between(self, borders: list[int]) -> list[int]:
        """Return how many elements of stored rows lie in each interval; borders may lie inside rows."""
        limits = torch.tensor(borders, device=self.device)
        row, column = limits // self.row_numel, limits % self.row_numel
        before, upto = torch.searchsorted(self.rows, row), torch.searchsorted(self.rows, row, right=True)
        return (before * self.row_numel + (upto - before) * column).diff().tolist()

    @override
    def slice(self, start: int, stop: int) -> RowSparse:
        self._check_borders(start, stop)
        limits = torch.tensor([start // self.row_numel, stop // self.row_numel], device=self.device)
        first, last = torch.searchsorted(self.rows, limits).tolist()
        return RowSparse(stop - start, self.rows[first:last] - start // self.row_numel, self.values[first:last])

    def widened(self) -> Dense:
        """Return the same tensor as `Dense`, in the same value type."""
        dense = self.values.new_zeros(self.numel)
        self._matrix(dense)[self.rows] = self.values
        return Dense(dense)

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """Return the sum at the union of the rows, as `Dense` if that takes no more bytes.

        Raises:
            PayloadError: the two do not fit together.
        """
        self._check_fits(other)
        if isinstance(other, Dense):
            return other.add(self, keep_lost)
        if not isinstance(other, RowSparse) or other.row_numel != self.row_numel:
            raise PayloadError("row-sparse payloads can be added to ones of the same row length only")
        keep = None if keep_lost is None else lambda rows, lost: self._keep_rows(keep_lost, rows, lost)
        total = RowSparse(self.numel, *add_index_sets(self.rows, self.values, other.rows, other.values, keep))
        dense_nbytes = HEADER_BYTES + self.numel * total.values.element_size()
        return total.widened() if total.nbytes >= dense_nbytes else total

    def _added_onto(self, values: torch.Tensor, keep_lost: KeepLost | None) -> torch.Tensor:
        total = values.to(torch.promote_types(values.dtype, self.values.dtype), copy=True)
        here = self._matrix(total).index_select(0, self.rows)
        there = add_values(here, self.values).to(total.dtype)
        if keep_lost is not None and total.dtype in SHORT:
            self._keep_rows(keep_lost, self.rows, lost_in_sum(here, self.values, there))
        self._matrix(total).index_copy_(0, self.rows, there)
        return total

    def _keep_rows(self, keep_lost: KeepLost, rows: torch.Tensor, lost: torch.Tensor) -> None:
        """Pass the rounding errors of rows, fp32 [rows, row_numel], to `keep_lost`."""
        positions = rows[:, None] * self.row_numel + torch.arange(self.row_numel, device=rows.device)
        keep_lost(0, lost.view(-1), positions.view(-1))

    def _matrix(self, dense: torch.Tensor) -> torch.Tensor:
        return dense.view(self.num_rows, self.row_numel)
