"""Seeded: values at positions that a seed gives, so that no index travels and all ranks send the same positions.

Body: seed u64 | values.

Bytes: 24 + z v.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import Self

import torch
from typing_extensions import override

from collectives.payloads.base import HEADER_BYTES, Header, KeepLost, Payload
from collectives.payloads.codec.positions import check_numel, seeded_positions
from collectives.payloads.codec.values import SHORT, add_values, lost_in_sum
from collectives.payloads.errors import PayloadError
from collectives.payloads.fields import Field, Reader, with_room
from collectives.payloads.indexed_values import IndexedValues
from collectives.payloads.sparse import as_sparse

FIXED = struct.Struct("<Q")
MAX_SEED = 2**64 - 1


@dataclasses.dataclass(eq=False)
class Seeded(IndexedValues):
    """Values at `seeded_positions(numel, len(values), seed)`.

    Attributes:
        numel: elements of the dense tensor.
        seed: 0..2^64 - 1, equal on all ranks of a sum.
        values: floating [z], in the type that travels, in order of their positions.

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
        """Length of a packed payload with this many entries."""
        return HEADER_BYTES + FIXED.size + num_entries * dtype.itemsize

    @staticmethod
    def room(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Values to be filled, `dtype` [count], where packing leaves them."""
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
        """The whole is itself; a part is `Sparse`, for its positions do not follow from the seed alone."""
        return self if (start, stop) == (0, self.numel) else as_sparse(self).slice(start, stop)

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """Values at the same positions add up; other positions give a `Sparse` union.

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
        """Itself, whose positions are these and need not be drawn."""
        self.__dict__["positions"] = positions
        return self

    def with_wire(self, wire: torch.Tensor) -> Seeded:
        """Other values at the same positions, which are not drawn again."""
        payload = Seeded(self.numel, self.seed, wire)
        if "positions" in self.__dict__ and wire.device == self.device:
            payload.__dict__["positions"] = self.positions
        return payload
