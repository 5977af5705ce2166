"""Sets of strictly ascending indices: their coding on the wire, the union of two, and random sets from a seed.

There are three codings of z indices below m. The shortest is used; it depends on z and m alone, so sizes are known
without encoding:
    coo: z indices of 1, 2 or 4 bytes (m <= 2^8, m <= 2^16, else).
    bitmap: one bit per element, ceil(m / 8) bytes.
    elias_fano: the low l = floor(log2(m / z)) bits of each index, and the high parts in unary, about 2 + log2(m / z)
        bits per index.

Source: P. Elias, "Efficient storage and retrieval by content and address of static files", JACM 21 (1974), section 3;
R. M. Fano, "On the number of bits required to implement an associative memory", MIT Project MAC memorandum 61 (1971).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch

from collectives.kernels.loop import ByteArray, Int, LongArray, Loop
from collectives.payloads.codec.bits import pack_bits, packed_nbytes, unpack_bits
from collectives.payloads.codec.philox import random_words
from collectives.payloads.codec.values import SHORT, to_value_dtype
from collectives.payloads.fields import Field, PayloadError, Reader

Coding = Literal["coo", "bitmap", "elias_fano"]
CODINGS: tuple[Coding, ...] = ("coo", "bitmap", "elias_fano")

_MARK = Loop("mark_bits", LongArray, Int, Int, Int, Int, ByteArray, returns=Int)
_FIND = Loop("find_bits", ByteArray, Int, Int, Int, Int, ByteArray, LongArray, returns=Int)
_ASCENDS = Loop("ascends", LongArray, Int, Int, returns=Int)


def coding_nbytes(coding: Coding, count: int, universe: int) -> int:
    """Return the bytes that a coding takes for `count` indices below `universe`."""
    if count == 0:
        return 0
    match coding:
        case "coo":
            return count * _coo_dtype(universe).itemsize
        case "bitmap":
            return packed_nbytes(universe, 1)
        case "elias_fano":
            low = _low_bits(count, universe)
            return packed_nbytes(count, low) + packed_nbytes(_unary_bits(count, universe, low), 1)


@functools.lru_cache(maxsize=4096)
def cheapest_coding(count: int, universe: int) -> Coding:
    """Return the coding with the fewest bytes; the simpler one if two are equal."""
    return min(CODINGS, key=lambda coding: coding_nbytes(coding, count, universe))


@functools.lru_cache(maxsize=4096)
def index_set_nbytes(count: int, universe: int) -> int:
    """Return the bytes that `count` indices below `universe` take in the cheapest coding."""
    return coding_nbytes(cheapest_coding(count, universe), count, universe)


def encode_indices(indices: torch.Tensor, universe: int, coding: Coding) -> list[Field]:
    """Encode indices as payload fields.

    Args:
        indices: int64 [z], strictly ascending, below `universe`.
        universe: number of elements that can be indexed.
        coding: the result of `cheapest_coding`.
    """
    count = indices.numel()
    if count == 0:
        return []
    match coding:
        case "coo":
            return [indices.to(_coo_dtype(universe))]
        case "bitmap":
            return [bitmap_of(indices, universe)]
        case "elias_fano":
            low = _low_bits(count, universe)
            unary = bitmap_of(indices, _unary_bits(count, universe, low), shift=low, per_index=1)
            return [pack_bits(indices, low), unary]


def decode_indices(reader: Reader, count: int, universe: int, coding: Coding) -> torch.Tensor:
    """Read what `encode_indices` wrote: int64 [count].

    Raises:
        PayloadError: the fields are cut short, or the indices do not ascend strictly below `universe`.
    """
    if count == 0:
        return reader.tensor(0, torch.int64)
    match coding:
        case "coo":
            dtype = _coo_dtype(universe)
            indices = reader.tensor(count, dtype).to(torch.int64) & ((1 << 8 * dtype.itemsize) - 1)
        case "bitmap":
            indices = positions_in(reader.tensor(packed_nbytes(universe, 1), torch.uint8), universe, count)
        case "elias_fano":
            low = _low_bits(count, universe)
            low_parts = reader.tensor(packed_nbytes(count, low), torch.uint8)
            num_bits = _unary_bits(count, universe, low)
            unary = reader.tensor(packed_nbytes(num_bits, 1), torch.uint8)
            indices = positions_in(unary, num_bits, count, shift=low, per_index=1, low_parts=low_parts)
    check_ascending(indices, universe)
    return indices


def check_ascending(indices: torch.Tensor, universe: int) -> None:
    """Raise PayloadError unless int64 `indices` ascend strictly within 0..universe-1."""
    if indices.numel() == 0:
        return
    if _ASCENDS.serves(indices):
        ascends = _ASCENDS(indices.contiguous(), indices.numel(), universe)
    else:
        ascends = indices[0] >= 0 and indices[-1] < universe and (indices[1:] > indices[:-1]).all()
    if not ascends:
        raise PayloadError(f"indices must ascend strictly within 0..{universe - 1}")


def add_index_sets(
    indices_a: torch.Tensor,
    values_a: torch.Tensor,
    indices_b: torch.Tensor,
    values_b: torch.Tensor,
    keep_lost: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the union of two index sets with values, which are added (and rounded once) where both have an entry.

    Args:
        indices_a: int64 [a], strictly ascending.
        values_a: floating [a] or [a, width].
        indices_b: int64 [b], strictly ascending.
        values_b: floating [b] or [b, width].
        keep_lost: called with the common indices and the rounding errors of their 16-bit sums, fp32.

    Returns:
        indices int64 [u], strictly ascending, and values [u] or [u, width] in the wider type of both; new tensors
        unless one set is empty.
    """
    dtype = torch.promote_types(values_a.dtype, values_b.dtype)
    if indices_a.numel() == 0:
        return indices_b, values_b.to(dtype)
    if indices_b.numel() == 0:
        return indices_a, values_a.to(dtype)
    indices, slots = _union(indices_a, indices_b)
    wide = torch.promote_types(dtype, torch.float32)
    total = torch.zeros((indices.numel(), *values_a.shape[1:]), dtype=wide, device=values_a.device)
    slots_a, slots_b = slots[: indices_a.numel()], slots[indices_a.numel() :]
    total.index_copy_(0, slots_a, values_a.to(wide))
    keeps = keep_lost is not None and dtype in SHORT
    both = slots_b[_any_in_row(total.index_select(0, slots_b))] if keeps else slots_b[:0]
    total.index_add_(0, slots_b, values_b.to(wide))
    values = to_value_dtype(total, dtype)
    if keep_lost is not None and both.numel():
        keep_lost(indices.index_select(0, both), total.index_select(0, both).sub_(values.index_select(0, both)))
    return indices, values


def _any_in_row(values: torch.Tensor) -> torch.Tensor:
    """Return which values [n], or rows of values [n, width], are not zero: bool [n]."""
    return values != 0 if values.dim() == 1 else (values != 0).any(1)


def _union(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the union of two ascending sets, and the index in it of each element of a, then of b."""
    both = torch.cat([a, b])
    if both.device.type == "cpu":  # numpy's stable sort merges the two ascending runs, in a third of the time
        order = torch.from_numpy(np.argsort(both.numpy(), kind="stable"))
    else:
        order = torch.argsort(both, stable=True)
    ascending = both.index_select(0, order)
    is_first = torch.ones(ascending.numel(), dtype=torch.bool, device=both.device)
    torch.ne(ascending[1:], ascending[:-1], out=is_first[1:])
    slot_of_ascending = is_first.cumsum(0) - 1
    slots = torch.empty_like(order).index_copy_(0, order, slot_of_ascending)
    union = ascending.new_empty(int(slot_of_ascending[-1]) + 1).index_copy_(0, slot_of_ascending, ascending)
    return union, slots


def _coo_dtype(universe: int) -> torch.dtype:
    """Return the narrowest type for an index; int16 and int32 stand for unsigned types, which torch hardly supports."""
    if universe <= 2**8:
        return torch.uint8
    return torch.int16 if universe <= 2**16 else torch.int32


def _low_bits(count: int, universe: int) -> int:
    return (universe // count).bit_length() - 1


def _unary_bits(count: int, universe: int, low: int) -> int:
    """Return the length of the unary part: one bit per index, and one for every step of the high parts."""
    return count + ((universe - 1) >> low)


def bitmap_of(positions: torch.Tensor, num_bits: int, *, shift: int = 0, per_index: int = 0) -> torch.Tensor:
    """Return a bitmap in which bit (positions[i] >> shift) + i * per_index is set for every i.

    Args:
        positions: int64 [count], ascending.
        num_bits: length of the bitmap in bits.
        shift: low bits of each position to leave out.
        per_index: 1 for the high parts in unary, 0 for a plain bitmap of the positions.

    Returns:
        uint8 [ceil(num_bits / 8)].

    Raises:
        IndexError: a bit to set lies outside the bitmap.
    """
    if _MARK.serves(positions):
        packed = torch.zeros(packed_nbytes(num_bits, 1), dtype=torch.uint8)
        if not _MARK(positions.contiguous(), positions.numel(), shift, per_index, num_bits, packed):
            raise IndexError(f"a position lies outside the {num_bits} bits of its bitmap")
        return packed
    mask = torch.zeros(num_bits, dtype=torch.bool, device=positions.device)
    mask[(positions >> shift) + per_index * torch.arange(positions.numel(), device=positions.device)] = True
    return pack_bits(mask, 1)


def positions_in(
    packed: torch.Tensor,
    num_bits: int,
    count: int,
    *,
    shift: int = 0,
    per_index: int = 0,
    low_parts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the positions, int64 [count], of a bitmap that `bitmap_of` made.

    Args:
        packed: uint8 [ceil(num_bits / 8)].
        num_bits: same as for `bitmap_of`.
        count: number of bits that are set.
        shift: same as for `bitmap_of`.
        per_index: same as for `bitmap_of`.
        low_parts: uint8 [ceil(count * shift / 8)], the packed low bits of the positions; None: they are zero.

    Raises:
        PayloadError: another number of bits is set.
    """
    if low_parts is None:
        low_parts = packed.new_zeros(packed_nbytes(count, shift))
    if _FIND.serves(packed):
        positions = torch.empty(count, dtype=torch.int64)
        found = _FIND(packed, num_bits, count, shift, per_index, low_parts, positions)
    else:
        bits = unpack_bits(packed, num_bits, 1).nonzero().view(-1)
        found = bits.numel()
        high = bits[:count] - per_index * torch.arange(min(found, count), device=packed.device)
        positions = unpack_bits(low_parts, count, shift)[:found] | (high << shift)
    if found != count:
        raise PayloadError(f"the index field marks {found} entries, the header says {count}")
    return positions


MOST = 2**32 - 1  # most elements to draw from, because the random numbers have 32 bits
SPARSEST = 256  # up to this many elements per position, marking drawn elements in a bitmap is worth its memory

_DRAW = Loop("draw_positions", Int, Int, Int, LongArray, LongArray)


def check_numel(numel: int) -> None:
    """Raise PayloadError if there are more elements than 32-bit random numbers can select."""
    if numel > MOST:
        raise PayloadError(f"positions are drawn among at most {MOST} elements; send smaller buckets")


def has_marks(numel: int, count: int) -> bool:
    """Return True if `count` positions are drawn with a bitmap of the elements."""
    return numel <= SPARSEST * min(count, numel - count)


def marks_for(numel: int) -> torch.Tensor:
    """Return a bitmap of `numel` zero bits: int64 [ceil(numel / 64)]."""
    return torch.zeros(-(-numel // 64), dtype=torch.int64)


def seeded_positions(numel: int, count: int, seed: int) -> torch.Tensor:
    """Return a uniformly random set of positions: the first `count` different ones that the seed's numbers select.

    Number w selects element w * numel // 2^32; numbers that would make some elements more likely are skipped. If
    `count` is more than half of `numel`, the positions to leave out are drawn instead.

    Args:
        numel: number of elements to draw from, at most 2^32 - 1.
        count: positions to draw, 0..numel.
        seed: 0..2^64 - 1.

    Returns:
        int64 [count] on the CPU, strictly ascending.

    Raises:
        PayloadError: `numel` is too large.
    """
    check_numel(numel)
    drawn = min(count, numel - count)
    if _DRAW.serves() and has_marks(numel, count):
        positions = torch.empty(count, dtype=torch.int64)
        _DRAW(numel, count, seed, marks_for(numel), positions)
        return positions
    positions = _first_distinct(numel, drawn, seed)
    if drawn == count:
        return positions
    others = torch.ones(numel, dtype=torch.bool)
    others[positions] = False
    return others.nonzero().view(-1)


def _first_distinct(numel: int, count: int, seed: int) -> torch.Tensor:
    """Return the first `count` different elements that the seed's numbers select, in ascending order."""
    num_words = count + count // 4 + 8
    while True:
        products = random_words(seed, num_words, torch.device("cpu")).numpy().astype(np.uint64) * np.uint64(numel)
        fair = products[products & np.uint64(2**32 - 1) >= 2**32 % max(1, numel)]
        elements, first_named = np.unique(fair >> np.uint64(32), return_index=True)
        if len(elements) >= count:
            is_early = first_named.argsort(kind="stable").argsort(kind="stable") < count
            return torch.from_numpy(elements[is_early].astype(np.int64))
        num_words *= 2
