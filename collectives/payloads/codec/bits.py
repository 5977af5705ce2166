"""Bit packing: small unsigned integers at their true width, for any width of 0 to 32 bits, on CPU and GPU.

A stream of b-bit codes repeats every lcm(8, b) bits, so the codes are laid out as a matrix of lanes (the codes of one
period) and every byte of the period is put together from the lanes that overlap it: a handful of shifts over long
vectors, no loop over elements. Unpacking on a CPU reads each lane as words that lie a period apart, one shift per lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch

from collectives.payloads.codec.cache_blocks import cache_blocks

First = Literal["low", "high"]

_WORDS = {1: torch.int64, 2: torch.int32, 4: torch.int16, 8: torch.uint8}  # 8 / bits codes, one byte each


def packed_nbytes(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take: ceil(count * bits / 8)."""
    return -(-count * bits // 8)


def bits_for(num_values: int) -> int:
    """Bits that tell `num_values` values apart: ceil(log2 num_values); 0 for one value or none."""
    return max(0, num_values - 1).bit_length()


def pack_bits(codes: torch.Tensor, bits: int, *, first: First = "low") -> torch.Tensor:
    """Lay codes end to end at their true width.

    Args:
        codes: integer or bool [count]; of each the low `bits` bits count.
        bits: width of one code, 0..32.
        first: where a byte's first code goes: its low bits, or its high bits (as MXNet's 2-bit compression does).

    Returns:
        uint8 [ceil(count * bits / 8)] on the same device; unused bits of the last byte are 0.
    """
    if codes.dtype == torch.bool and (bits, first) == (1, "low"):
        return pack_mask(codes)
    pack = _pack_words if bits in _WORDS else _pack_lanes
    packed = torch.empty(packed_nbytes(codes.numel(), bits), dtype=torch.uint8, device=codes.device)
    for part in cache_blocks(codes.numel() if bits else 0, codes.device, multiple_of=8):
        packed[_bytes_of(part, bits)] = pack(codes[part], bits, first)
    return packed


def unpack_bits(packed: torch.Tensor, count: int, bits: int, *, first: First = "low") -> torch.Tensor:
    """The inverse of `pack_bits`.

    Args:
        packed: uint8 [>= ceil(count * bits / 8)].
        count: number of codes.
        bits: width of one code, 0..32.
        first: as it was packed.

    Returns:
        int64 [count].
    """
    unpack = _unpack_strided if packed.device.type == "cpu" else _unpack_lanes
    codes = torch.zeros(count, dtype=torch.int64, device=packed.device)
    for part in cache_blocks(count if bits else 0, packed.device, multiple_of=8):
        codes[part] = unpack(packed[_bytes_of(part, bits)], part.stop - part.start, bits, first)
    return codes


def pack_mask(mask: torch.Tensor) -> torch.Tensor:
    """A bitmap: uint8 [ceil(count / 8)] from bool [count]; element i is bit i % 8 of byte i // 8."""
    if mask.device.type == "cpu":  # numpy packs 8 elements per instruction; a tenth of the time for large masks
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
    return _pack_words(mask, 1, "low")


def unpack_mask(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The inverse of `pack_mask`: bool [count] from uint8 [>= ceil(count / 8)]."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=count, bitorder="little")).view(torch.bool)
    return unpack_bits(packed, count, 1).to(torch.bool)


def _bytes_of(part: slice, bits: int) -> slice:
    """Where a stretch that starts at a multiple of 8 codes lies in the packed bytes."""
    return slice(part.start * bits // 8, packed_nbytes(part.stop, bits))


def _pack_words(codes: torch.Tensor, bits: int, first: First) -> torch.Tensor:
    """The same as `_pack_lanes` where whole codes fill a byte: their bytes, read as one word, are shifted together."""
    padded = codes.new_zeros(-(-codes.numel() // 8) * 8, dtype=torch.uint8)
    padded[: codes.numel()] = codes
    padded &= (1 << bits) - 1
    words = padded.view(_WORDS[bits])
    packed = torch.zeros_like(words)
    for lane in range(8 // bits):
        place = lane * bits if first == "low" else 8 - (lane + 1) * bits
        packed |= _shifted(words, place - 8 * lane)  # the other lanes land outside the low byte
    return packed.to(torch.uint8)[: packed_nbytes(codes.numel(), bits)]


def _pack_lanes(codes: torch.Tensor, bits: int, first: First) -> torch.Tensor:
    num_lanes, num_bytes = _period(bits)
    count, num_periods = codes.numel(), -(-codes.numel() // num_lanes)
    padded = codes.new_zeros(num_periods * num_lanes, dtype=_work_dtype(bits))
    padded[:count] = codes
    padded &= (1 << bits) - 1
    lanes = padded.view(num_periods, num_lanes).t().contiguous()
    packed = torch.zeros(num_bytes, num_periods, dtype=torch.uint8, device=codes.device)
    for lane, byte, shift in _overlaps(bits, first):
        packed[byte] |= _shifted(lanes[lane], shift).to(torch.uint8)
    return packed.t().reshape(-1)[: packed_nbytes(count, bits)]


def _unpack_strided(packed: torch.Tensor, count: int, bits: int, first: First) -> torch.Tensor:
    """The same as `_unpack_lanes`, many times faster; numpy alone reads words that start at any byte."""
    num_lanes, num_bytes = _period(bits)
    num_periods = -(-count // num_lanes)
    word_nbytes = next(nbytes for nbytes in (2, 4, 8) if 8 * nbytes >= bits + 7)  # a code starts at any bit of a byte
    padded = np.zeros(num_periods * num_bytes + word_nbytes, dtype=np.uint8)
    padded[: packed.numel()] = packed.numpy()
    codes = np.empty((num_periods, num_lanes), dtype=np.int64)
    word = np.dtype(f"{'<' if first == 'low' else '>'}u{word_nbytes}")
    for lane in range(num_lanes):
        byte, bit = divmod(lane * bits, 8)
        words = np.ndarray((num_periods,), word, padded.data, offset=byte, strides=(num_bytes,))
        codes[:, lane] = (words >> (bit if first == "low" else 8 * word_nbytes - bits - bit)) & ((1 << bits) - 1)
    return torch.from_numpy(codes).view(-1)[:count]


def _unpack_lanes(packed: torch.Tensor, count: int, bits: int, first: First) -> torch.Tensor:
    num_lanes, num_bytes = _period(bits)
    num_periods = -(-count // num_lanes)
    padded = packed.new_zeros(num_periods * num_bytes)
    padded[: packed.numel()] = packed
    rows = padded.view(num_periods, num_bytes).t().to(_work_dtype(bits)).contiguous()
    lanes = rows.new_zeros(num_lanes, num_periods)
    for lane, byte, shift in _overlaps(bits, first):
        lanes[lane] |= _shifted(rows[byte], -shift)
    lanes &= (1 << bits) - 1
    return lanes.t().reshape(-1)[:count]


def _period(bits: int) -> tuple[int, int]:
    """(codes, bytes) after which codes and bytes start together again."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _work_dtype(bits: int) -> torch.dtype:
    """The narrowest type in which a code and a byte shifted to a code's top both fit without touching the sign."""
    if bits <= 8:
        return torch.uint8
    return torch.int32 if bits <= 23 else torch.int64


def _overlaps(bits: int, first: First) -> Iterator[tuple[int, int, int]]:
    """(lane, byte, shift) for every lane that has bits in a byte: byte |= lane << shift (>> where negative)."""
    num_lanes, _ = _period(bits)
    for lane in range(num_lanes):
        start, stop = lane * bits, (lane + 1) * bits
        for byte in range(start // 8, (stop - 1) // 8 + 1):
            yield lane, byte, (start - 8 * byte if first == "low" else 8 * (byte + 1) - stop)


def _shifted(x: torch.Tensor, shift: int) -> torch.Tensor:
    return x << shift if shift >= 0 else x >> -shift
