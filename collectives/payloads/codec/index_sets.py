"""Sets of strictly ascending indices: how they are coded in messages, and sums of values at such indices.

There are three codings of z indices below m. The shortest is used; it depends only on z and m, so sizes are known
without encoding:
    coo: z indices of 1 byte if m <= 2^8, 2 bytes if m <= 2^16, otherwise 4 bytes.
    bitmap: one bit per element, ceil(m / 8) bytes.
    elias_fano: the low l = floor(log2(m / z)) bits of each index, and the high parts in unary; together about
        2 + log2(m / z) bits per index.

Source: P. Elias, "Efficient storage and retrieval by content and address of static files", JACM 21 (1974), section 3;
R. M. Fano, "On the number of bits required to implement an associative memory", MIT Project MAC memorandum 61 (1971).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from collectives.kernels.loop import ByteArray, Float, Int, LongArray, Longs, Loop, addresses, longs
from collectives.payloads.codec.bits import pack_bits, packed_nbytes, unpack_bits
from collectives.payloads.codec.values import SHORT, add_values, to_value_dtype
from collectives.payloads.fields import Field, PayloadError, Reader

Coding = Literal["coo", "bitmap", "elias_fano"]
CODINGS: tuple[Coding, ...] = ("coo", "bitmap", "elias_fano")

_MARK = Loop("mark_bits", LongArray, Int, Int, Int, Int, ByteArray, returns=Int)
_FIND = Loop("find_bits", ByteArray, Int, Int, Int, Int, ByteArray, LongArray, returns=Int)
_ASCENDS = Loop("ascends", LongArray, Int, Int, returns=Int)
_WRITE = Loop("write_sum", Longs, Longs, Longs, Longs, Longs, Int, Float, Int, Longs, Longs, Int)
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def coding_nbytes(coding: Coding, count: int, universe: int) -> int:
    """Return the bytes that `count` indices below `universe` take as "coo", "bitmap" or "elias_fano"."""
    if count == 0:
        return 0
    match coding:
        case "coo":
            return count * _coo_dtype(universe).itemsize
        case "bitmap":
            return packed_nbytes(universe, 1)
        case "elias_fano":
            low, num_bits = elias_fano_bits(count, universe)
            return packed_nbytes(count, low) + packed_nbytes(num_bits, 1)


@functools.lru_cache(maxsize=4096)
def cheapest_coding(count: int, universe: int) -> Coding:
    """Return the coding, such as "bitmap", in which `count` indices below `universe` take the fewest bytes."""
    return min(CODINGS, key=lambda coding: coding_nbytes(coding, count, universe))


@functools.lru_cache(maxsize=4096)
def index_set_nbytes(count: int, universe: int) -> int:
    """Return the bytes of `count` ascending indices below `universe` in the shortest coding."""
    return coding_nbytes(cheapest_coding(count, universe), count, universe)


def encode_indices(indices: torch.Tensor, universe: int, coding: Coding) -> list[Field]:
    """Encode indices, and return them as fields (byte strings or tensors) of a payload.

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
            low, num_bits = elias_fano_bits(count, universe)
            return [pack_bits(indices, low), bitmap_of(indices, num_bits, shift=low, per_index=1)]


def decode_indices(reader: Reader, count: int, universe: int, coding: Coding) -> torch.Tensor:
    """Read indices that `encode_indices` wrote, and return them, int64 [count].

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
            low, num_bits = elias_fano_bits(count, universe)
            low_parts = reader.tensor(packed_nbytes(count, low), torch.uint8)
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
    keep_lost: Callable[..., None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of two sparse tensors, each given by its indices and values.

    If both tensors have an entry at an index, the values are added in fp32 or wider and rounded once.

    Args:
        indices_a: int64 [a], strictly ascending.
        values_a: floating [a] or [a, width].
        indices_b: int64 [b], strictly ascending.
        values_b: floating [b] or [b, width].
        keep_lost: called as (0, rounding errors of 16-bit sums in fp32, indices of these sums); None if not needed.

    Returns:
        The union of the indices, int64 [u], strictly ascending, and the values, [u] or [u, width], in the wider of both
        dtypes; these are new tensors unless one set is empty.
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
    both = slots_b[:0]
    if keep_lost is not None and dtype in SHORT:
        summed = total.index_select(0, slots_b) != 0
        both = slots_b[summed if summed.dim() == 1 else summed.any(1)]
    total.index_add_(0, slots_b, values_b.to(wide))
    values = to_value_dtype(total, dtype)
    if keep_lost is not None and both.numel():
        lost = total.index_select(0, both).sub_(values.index_select(0, both))
        keep_lost(0, lost, indices.index_select(0, both))
    return indices, values


def add_at(
    values: torch.Tensor, indices: torch.Tensor, addends: torch.Tensor, keep_lost: Callable[..., None] | None
) -> torch.Tensor:
    """Return a copy of `values` [n, ...] with `addends` [z, ...] added at these indices [z].

    The sums have the wider of both dtypes and are rounded once. If `keep_lost` is not None, it is called as (0,
    rounding errors of 16-bit sums in fp32, indices of these sums).
    """
    total = values.to(torch.promote_types(values.dtype, addends.dtype), copy=True)
    sums = add_values(total.index_select(0, indices), addends, keep_lost, indices)
    return total.index_copy_(0, indices, sums)


def _union(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the union of two ascending sets, and the index in the union of each element of a, then of each of b."""
    both = torch.cat([a, b])
    if both.device.type == "cpu":  # numpy's stable sort merges two ascending runs in a third of the time of torch
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


def write_sum_(
    values: Sequence[torch.Tensor], positions: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, divisor: float
) -> bool:
    """Write the sum of sparse terms, divided by `divisor`, into `parts`; the sum starts with zeros.

    Args:
        values: values of each term, floating [n]; at least one term.
        positions: positions of each term's values, int64 [n], ascending.
        parts: tensors for consecutive parts of the result, 1-D; overwritten.
        divisor: the sum is divided by this number.

    Returns:
        True; False, with `parts` unchanged, if no native loop supports these tensors.

    Raises:
        IndexError: the positions of a term do not ascend within the parts' elements.
    """
    unsuitable = [part for part in parts if part.dtype != torch.float32 or not (part.is_cpu and part.is_contiguous())]
    if unsuitable or any(held.dtype not in _KINDS for held in values) or not _WRITE.serves(*values):
        return False
    values, positions = ([held.contiguous() for held in each] for each in (values, positions))
    kinds, counts = longs([_KINDS[held.dtype] for held in values]), longs([held.numel() for held in values])
    following, lengths = longs([0] * len(values)), longs([part.numel() for part in parts])
    divide_first = math.frexp(divisor)[0] == 0.5  # dividing by a power of two is exact
    _WRITE(
        addresses(values), kinds, addresses(positions), counts, following, len(values), divisor, divide_first,
        addresses(parts), lengths, len(parts),
    )  # fmt: skip
    if list(following) != list(counts):
        raise IndexError(f"positions do not ascend within the {sum(lengths)} elements")
    return True


def _coo_dtype(universe: int) -> torch.dtype:
    # int16 and int32 hold unsigned numbers here, because torch hardly supports unsigned types
    if universe <= 2**8:
        return torch.uint8
    return torch.int16 if universe <= 2**16 else torch.int32


def elias_fano_bits(count: int, universe: int) -> tuple[int, int]:
    """Return two sizes of an Elias-Fano coding: the low bits per index, and the bits of all high parts together.

    The high parts are coded in unary: one bit per index, and one bit for every step from a high part to the next.
    """
    low = (universe // count).bit_length() - 1
    return low, count + ((universe - 1) >> low)


def bitmap_of(positions: torch.Tensor, num_bits: int, *, shift: int = 0, per_index: int = 0) -> torch.Tensor:
    """Return a bitmap in which bit (positions[i] >> shift) + i * per_index is set for every i.

    Args:
        positions: int64 [count], ascending.
        num_bits: length of the bitmap in bits.
        shift: number of low bits of each position to leave out.
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
    """Return the positions, int64 [count], that `bitmap_of` stored in a bitmap.

    Args:
        packed: the bitmap, uint8 [ceil(num_bits / 8)].
        num_bits: length of the bitmap in bits.
        count: number of bits that are set.
        shift: number of low bits of each position that the bitmap leaves out.
        per_index: 1 for the high parts in unary, 0 for a plain bitmap of the positions.
        low_parts: the packed low bits of the positions, uint8 [ceil(count * shift / 8)]; None if they are zero.

    Raises:
        PayloadError: the number of bits that are set is not `count`.
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
        raise PayloadError(f"the bitmap of indices has {found} bits set, but the header says {count} entries")
    return positions
