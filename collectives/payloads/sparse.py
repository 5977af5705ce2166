"""Sparse: index and value of the elements that are kept.

Body: values and indices, wider field first; the flags name the coding of the indices (`codec/index_sets.py`). Where
the dense form is no longer, the payload travels as `Dense` instead. A payload of zeros only is its header.

Bytes: 16 + min over codings (z v + indices), at most 16 + m v.
"""

from __future__ import annotations

import dataclasses

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Header, KeepLost, Payload
from collectives.payloads.codec.index_sets import (
    CODINGS,
    add_index_sets,
    cheapest_coding,
    coding_nbytes,
    decode_indices,
    encode_indices,
    index_set_nbytes,
)
from collectives.payloads.dense import Dense
from collectives.payloads.errors import PayloadError
from collectives.payloads.fields import Field, Reader
from collectives.payloads.indexed_values import IndexedValues, canonical_values


@dataclasses.dataclass(eq=False)
class Sparse(IndexedValues):
    """Values at strictly ascending positions.

    Attributes:
        numel: elements of the dense tensor.
        indices: integer [z], strictly ascending, below `numel`; kept as int64.
        values: floating [z], in the type that travels; -0.0 becomes +0.0, and where all are zero nothing is kept.

    Raises:
        PayloadError: `indices` and `values` are not 1-D of one length.
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
        """Length of a packed payload with this many entries, not all of them zero."""
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
        """Whether the dense form takes no more bytes."""
        return self.num_entries > 0 and self.nbytes == HEADER_BYTES + self.numel * self.values.element_size()

    def widened(self) -> Dense:
        """The same values as `Dense`, in the same value type."""
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
        """Union of the index sets, kept even where values cancel; `Dense` as soon as that takes no more bytes.

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
    """The same values at the same positions, as `Sparse`; shares their memory."""
    return Sparse(payload.numel, payload.positions, payload.values)


def _indices_first(count: int, numel: int, coding: str, dtype: torch.dtype) -> bool:
    """Wider fields come first, so that both can be read in place: 4-byte indices go before 2-byte values."""
    return coding == "coo" and coding_nbytes("coo", count, numel) > count * dtype.itemsize
