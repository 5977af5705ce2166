"""Bit packing of unsigned integers, for any width of 0 to 32 bits."""

from __future__ import annotations

from typing import Literal

import torch

from collectives.kernels.loop import ByteArray, Int, LongArray, Loop

First = Literal["low", "high"]

_PACK = Loop("pack_bits", LongArray, Int, Int, ByteArray)
_UNPACK = Loop("unpack_bits", ByteArray, Int, Int, LongArray)


def packed_nbytes(count: int, bits: int) -> int:
    """Return the bytes that `count` codes of `bits` bits take: ceil(count * bits / 8)."""
    return -(-count * bits // 8)


def bits_for(num_values: int) -> int:
    """Return the bits that distinguish `num_values` values: ceil(log2 num_values); 0 for one value or none."""
    return max(0, num_values - 1).bit_length()


def pack_bits(codes: torch.Tensor, bits: int, *, first: First = "low") -> torch.Tensor:
    """Pack codes without gaps.

    Args:
        codes: integer or bool [count]; only the low `bits` bits of each are used.
        bits: width of one code, 0..32.
        first: whether a byte's first code lies in its low or its high bits (high: MXNet's 2-bit compression).

    Returns:
        uint8 [ceil(count * bits / 8)] on the same device; unused bits of the last byte are 0.
    """
    codes = codes.to(torch.int64).contiguous()
    if first == "low" and _PACK.serves(codes):
        packed = torch.empty(packed_nbytes(codes.numel(), bits), dtype=torch.uint8)
        _PACK(codes, codes.numel(), bits, packed)
        return packed
    spread = (codes.unsqueeze(1) >> _places(bits, first, codes.device)) & 1
    of_bytes = torch.nn.functional.pad(spread.view(-1), (0, -spread.numel() % 8)).view(-1, 8)
    return (of_bytes << _places(8, first, codes.device)).sum(1).to(torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int, bits: int, *, first: First = "low") -> torch.Tensor:
    """Unpack what `pack_bits` returned.

    Args:
        packed: uint8 [>= ceil(count * bits / 8)], contiguous.
        count: number of codes.
        bits: width of one code, 0..32.
        first: same as for `pack_bits`.

    Returns:
        int64 [count].
    """
    if first == "low" and _UNPACK.serves(packed):
        codes = torch.empty(count, dtype=torch.int64)
        _UNPACK(packed, count, bits, codes)
        return codes
    of_bytes = packed[: packed_nbytes(count, bits)].to(torch.int64).unsqueeze(1)
    spread = (of_bytes >> _places(8, first, packed.device)) & 1
    return (spread.view(-1)[: count * bits].view(count, bits) << _places(bits, first, packed.device)).sum(1)


def _places(bits: int, first: First, device: torch.device) -> torch.Tensor:
    """Return the bit numbers of a code or a byte in packing order."""
    places = torch.arange(bits, device=device)
    return places if first == "low" else places.flip(0)
