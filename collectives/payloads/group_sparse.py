"""GroupSparse: a payload with k entries in every group of consecutive elements, indexed within their group.

Body: group_size u32 | k u32 | values | local indices, ceil(log2 group_size) bits each, low bits first; or, if that is
shorter, a bitmap of all elements (flag 1). The last group may be shorter and then has its own k, which follows from
the number of entries. If all values are zero, only header and fixed fields are sent.

Bytes: 24 + z v + min(ceil(z ceil(log2 min(group_size, m)) / 8), ceil(m / 8)).
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from typing import ClassVar, Self

import torch
from typing_extensions import override

from collectives.kernels.loop import ByteArray, Int, IntArray, LongArray, Loop
from collectives.payloads.base import HEADER_BYTES, Header, KeepLost, Payload
from collectives.payloads.codec.bits import bits_for, pack_bits, packed_nbytes, unpack_bits
from collectives.payloads.codec.index_sets import bitmap_of, check_ascending, positions_in
from collectives.payloads.fields import Field, PayloadError, Reader
from collectives.payloads.sparse import IndexedValues, Sparse, as_sparse, canonical_values

FIXED = struct.Struct("<II")
LOCAL, BITMAP = 0, 1

_UNPACK_GROUPS = Loop("unpack_groups", ByteArray, Int, Int, Int, Int, Int, IntArray, LongArray, returns=Int)
_ADD_GROUP_STARTS = Loop("add_group_starts", LongArray, Int, Int, Int, returns=Int)


@dataclasses.dataclass(eq=False)
class GroupSparse(IndexedValues):
    """Sends k values per group of `group_size` consecutive elements; a shorter last group may have fewer.

    Attributes:
        numel: elements of the dense tensor.
        group_size: elements per group.
        k: entries per group, 1..group_size.
        values: floating [z] with z = (num_groups - 1) * k + last_k, group after group; -0.0 becomes +0.0, and if all
            are zero, none is stored.
        indices: integer [z], index within the group, ascending within each group.

    Raises:
        PayloadError: the counts do not fit together.
    """

    code = 3
    addable = True
    splits_blocks: ClassVar[bool] = True

    numel: int
    group_size: int
    k: int
    values: torch.Tensor
    indices: torch.Tensor

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.group_size:
            raise PayloadError(f"k must lie in 1..{self.group_size} (the group size), got {self.k}")
        if self.values.dim() != 1 or self.values.shape != self.indices.shape:
            raise PayloadError(
                f"values {list(self.values.shape)} and indices {list(self.indices.shape)} must be 1-D and equally long"
            )
        count, most = self.num_entries, min(self.k, self._last_size)
        if count and not 1 <= self.last_k <= most:
            raise PayloadError(
                f"{count} entries do not fill {self.num_groups} groups with {self.k} each (the last one with 1..{most})"
            )
        self.values = canonical_values(self.values)
        if self.num_entries < count:
            self.indices = self.indices[: self.num_entries]

    @classmethod
    def at(
        cls, positions: torch.Tensor, numel: int, group_size: int, k: int, values: torch.Tensor, indices: torch.Tensor
    ) -> Self:
        """Create a payload whose flat positions, int64 [z], are already known and need not be computed."""
        payload = cls(numel, group_size, k, values, indices)
        count = payload.num_entries
        payload.__dict__["positions"] = positions if count == len(positions) else positions[:count]
        return payload

    @staticmethod
    def packed_nbytes(numel: int, group_size: int, num_entries: int, dtype: torch.dtype) -> int:
        """Return the length of a packed payload with this many entries, not all of them zero."""
        indices = min(packed_nbytes(num_entries, bits_for(min(group_size, numel))), packed_nbytes(numel, 1))
        return HEADER_BYTES + FIXED.size + num_entries * dtype.itemsize + indices

    @property
    def num_groups(self) -> int:
        """Return the number of groups, a shorter last one included."""
        return -(-self.numel // self.group_size)

    @property
    def last_k(self) -> int:
        """Return the number of entries in the last group."""
        return self.num_entries - (self.num_groups - 1) * self.k if self.num_entries else 0

    @property
    @override
    def nbytes(self) -> int:
        return self.packed_nbytes(self.numel, self.group_size, self.num_entries, self.values.dtype)

    @property
    @override
    def alignment(self) -> int:
        return self.group_size

    @functools.cached_property
    @override
    def positions(self) -> torch.Tensor:
        return _positions(self.indices, self.group_size, self.k)

    @override
    def fields(self) -> list[Field]:
        coding = BITMAP if self._bits * self.num_entries > 8 * packed_nbytes(self.numel, 1) else LOCAL
        header = self._header(self.values.dtype, num_entries=self.num_entries, flags=coding)
        if coding == LOCAL:
            indices = pack_bits(self.indices, self._bits)
        else:
            indices = bitmap_of(self.positions, self.numel)
        return [header + FIXED.pack(self.group_size, self.k), self.values, indices]

    @override
    @classmethod
    def from_wire(cls, header: Header, body: torch.Tensor) -> Self:
        dtype, count = cls._dtype_in(header), header.num_entries
        reader = Reader(body)
        group_size, k = map(int, reader.fields(FIXED))
        if not 1 <= k <= group_size:
            raise PayloadError(f"k = {k} does not fit groups of {group_size}")
        values = reader.tensor(count, dtype)
        if header.flags == LOCAL:
            bits = bits_for(min(group_size, header.numel))
            packed = reader.tensor(packed_nbytes(count, bits), torch.uint8)
            indices, positions = _unpack_groups(packed, count, bits, group_size, k, header.numel)
        elif header.flags == BITMAP:
            bitmap = reader.tensor(packed_nbytes(header.numel, 1), torch.uint8)
            indices = positions_in(bitmap, header.numel, count)
            indices -= _group_starts(count, group_size, k, indices.device)
            positions = _positions(indices, group_size, k)
        else:
            raise PayloadError(f"no index coding of GroupSparse has the number {header.flags}")
        return cls.at(positions, header.numel, group_size, k, values, indices)

    def slice(self, start: int, stop: int) -> IndexedValues:
        """Return a part; `Sparse` if a border lies inside a group, because not all groups then have `k` entries."""
        self._check_borders(start, stop)
        if any(border % self.group_size and border != self.numel for border in (start, stop)):
            begin, end = torch.searchsorted(self.positions, torch.tensor([start, stop], device=self.device)).tolist()
            return Sparse(stop - start, self.positions[begin:end] - start, self.values[begin:end])
        first, last = (-(-border // self.group_size) * self.k for border in (start, stop))
        entries = slice(
            min(first, self.num_entries), self.num_entries if stop == self.numel else min(last, self.num_entries)
        )
        return GroupSparse(stop - start, self.group_size, self.k, self.values[entries], self.indices[entries])

    def add(self, other: Payload, keep_lost: KeepLost | None = None) -> Payload:
        """Return the sum as `Sparse` or `Dense`: groups of a sum can have different numbers of entries.

        Raises:
            PayloadError: the two do not fit together.
        """
        self._check_fits(other)
        return as_sparse(self).add(other, keep_lost)

    @property
    def _bits(self) -> int:
        return bits_for(min(self.group_size, self.numel))

    @property
    def _last_size(self) -> int:
        """Return the number of elements in the last group."""
        return self.numel - (self.num_groups - 1) * self.group_size if self.numel else 0


def _unpack_groups(
    packed: torch.Tensor, count: int, bits: int, group_size: int, k: int, numel: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices within their groups, integer [count], and flat positions, int64 [count].

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
    """Return the flat positions, int64 [count], of integer indices [count] within their groups.

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
    """Return the first position of each entry's group, int64 [count]."""
    starts = torch.arange(-(-count // k), device=device) * group_size
    return starts[:, None].expand(-1, k).reshape(-1)[:count]
