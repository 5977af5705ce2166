"""SparseLevels: a payload with indices and, for each, a sign and one of eight magnitudes (four bits per value).

Body: low f32 | ratio f32 | indices | codes of four bits, low bits first: j for the magnitude low * ratio^j, plus 8 if
negative. The header's flags say how the indices are coded (`codec/index_sets.py`). If all values are zero, only header
and fixed fields are sent.

Bytes: 24 + min over codings (indices) + ceil(z / 2).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
from typing import Self

import torch
from typing_extensions import override

from collectives.kernels.loop import ByteArray, Double, FloatArray, Int, Loop
from collectives.payloads.base import HEADER_BYTES, Header, KeepLost, Payload
from collectives.payloads.codec.bits import pack_bits, packed_nbytes, unpack_bits
from collectives.payloads.codec.index_sets import (
    CODINGS,
    cheapest_coding,
    decode_indices,
    encode_indices,
    index_set_nbytes,
)
from collectives.payloads.fields import Field, PayloadError, Reader
from collectives.payloads.sparse import IndexedValues, as_sparse

_TAKE = Loop("take_levels", ByteArray, Int, Double, Double, FloatArray)

FIXED = struct.Struct("<ff")
BITS = 4
NUM_LEVELS = NEGATIVE = 8
LARGEST = torch.finfo(torch.float32).max


@dataclasses.dataclass(eq=False)
class SparseLevels(IndexedValues):
    """Sends indices, and for each the value low * ratio^j or -low * ratio^j as a 4-bit code, j = 0..7.

    Attributes:
        numel: elements of the dense tensor.
        indices: int64 [z], strictly ascending, below `numel`.
        low, ratio: in fp32 precision, low > 0 and ratio >= 1; 0 if there are no entries.
        packed: uint8 [ceil(z / 2)], the codes: j, plus 8 if negative, low bits first.

    Raises:
        PayloadError: the counts do not fit together, or `low` or `ratio` is out of range.
    """

    code = 11
    dtypes = (torch.float32,)
    addable = True

    numel: int
    indices: torch.Tensor
    low: float
    ratio: float
    packed: torch.Tensor

    def __post_init__(self) -> None:
        if self.indices.dim() != 1 or self.packed.numel() != packed_nbytes(self.num_entries, BITS):
            raise PayloadError(f"{self.packed.numel()} bytes of codes do not fit indices {list(self.indices.shape)}")
        if not self.num_entries:
            self.low = self.ratio = 0.0
        elif not (0 < self.low < math.inf and 1 <= self.ratio < math.inf):
            raise PayloadError(f"levels need low > 0 and ratio >= 1, got low={self.low} and ratio={self.ratio}")

    @staticmethod
    def packed_nbytes(numel: int, num_entries: int) -> int:
        """Return the length of a packed payload with this many entries."""
        return HEADER_BYTES + FIXED.size + index_set_nbytes(num_entries, numel) + packed_nbytes(num_entries, BITS)

    @property
    @override
    def device(self) -> torch.device:
        return self.packed.device

    @property
    @override
    def num_entries(self) -> int:
        return self.indices.numel()

    @property
    @override
    def positions(self) -> torch.Tensor:
        return self.indices

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

    @property
    @override
    def nbytes(self) -> int:
        return self.packed_nbytes(self.numel, self.num_entries)

    @override
    def fields(self) -> list[Field]:
        coding = cheapest_coding(self.num_entries, self.numel)
        header = self._header(torch.float32, num_entries=self.num_entries, flags=CODINGS.index(coding))
        indices = encode_indices(self.indices, self.numel, coding)
        return [header + FIXED.pack(self.low, self.ratio), *indices, self.packed]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        reader, count = Reader(body), header.num_entries
        low, ratio = map(float, reader.fields(FIXED))
        cls._dtype_in(header)  # raises unless fp32
        if header.flags >= len(CODINGS):
            raise PayloadError(f"no index coding has the number {header.flags}")
        indices = decode_indices(reader, count, header.numel, CODINGS[header.flags])
        return cls(header.numel, indices, low, ratio, reader.tensor(packed_nbytes(count, BITS), torch.uint8))

    @override
    def slice(self, start: int, stop: int) -> SparseLevels:
        self._check_borders(start, stop)
        first, last = torch.searchsorted(self.indices, torch.tensor([start, stop], device=self.device)).tolist()
        codes = unpack_bits(self.packed, self.num_entries, BITS)[first:last]
        indices = self.indices[first:last] - start
        return SparseLevels(stop - start, indices, self.low, self.ratio, pack_bits(codes, BITS))

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """Return the sum as `Sparse` in fp32 or `Dense`, because sums are not among the levels.

        Raises:
            PayloadError: the two do not fit together.
        """
        self._check_fits(other)
        return as_sparse(self).add(other, keep_lost)


def levels(low: float, ratio: float) -> list[float]:
    """Return the eight magnitudes, multiplied one after another in fp64 so that all machines agree."""
    row = [low]
    while len(row) < NUM_LEVELS:
        row.append(min(row[-1] * ratio, LARGEST))
    return row
