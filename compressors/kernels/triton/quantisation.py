"""Triton kernels of `compressors/kernels/quantisation.py`."""

import math

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import Parts, launch
from collectives.payloads.codec.triton import shared_tile, uniform
from compressors.kernels.quantisation import LEVELS, divisors, output_of
from compressors.kernels.triton.selection import (
    magnitude_bits,
    pack_tile,
    relative_tile,
    row_maxima,
    row_sums,
    store_bytes,
    sum_of_magnitudes,
)

TILE = 2048
SIGN_TILE = 4096


def block_maxima(x: Parts, block_numel: int) -> torch.Tensor:
    return row_maxima(x.flat, block_numel).view(torch.float32)


def block_squares(x: Parts, block_numel: int) -> torch.Tensor:
    return row_sums(x.flat, block_numel, "square", math.inf)


def pack_levels(
    x: Parts,
    scales: torch.Tensor,
    block_numel: int,
    *,
    bits: int,
    multiplier: int = 1,
    key: int | None = None,
    out: torch.Tensor,
) -> None:
    launch(
        _pack_levels, triton.cdiv(x.numel, TILE),
        x.flat, divisors(scales), out, x.numel, block_numel, float(multiplier), key or 0,
        AT_RANDOM=key is not None, BITS=bits, TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key"])
def _pack_levels(
    x, divisors, out, numel, block_numel, multiplier, key,
    AT_RANDOM: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    PARTS: tl.constexpr = 8388608 if AT_RANDOM else 1
    MOST: tl.constexpr = PARTS * ((1 << (BITS - 1)) - 1)
    levels = relative_tile(x, divisors, numel, block_numel, first, TILE) * (PARTS * multiplier)
    levels = tl.where(levels == levels, levels, 0.0)
    levels = tl.where(levels > MOST, MOST * 1.0, levels)
    levels = tl.where(levels < -MOST, MOST * -1.0, levels)
    whole = tl.where(levels < 0, -8388608.0, 8388608.0)  # 2^23: adding it rounds to an integer
    rounded = tl.where(tl.abs(levels) < 8388608.0, levels + whole - whole, levels).to(tl.int32)
    if AT_RANDOM:
        rounded = (rounded + (shared_tile(key, first, TILE) >> 9).to(tl.int32)) >> 23
    store_bytes(out, pack_tile(rounded, BITS, False, TILE), numel, BITS, TILE)


def pack_powers(x: Parts, scales: torch.Tensor, block_numel: int, *, bits: int, key: int, out: torch.Tensor) -> None:
    launch(
        _pack_powers, triton.cdiv(x.numel, TILE),
        x.flat, divisors(scales), out, x.numel, block_numel, key, BITS=bits, TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key"])
def _pack_powers(x, divisors, out, numel, block_numel, key, BITS: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    NUM_EXPONENTS: tl.constexpr = (1 << (BITS - 1)) - 1
    SMALLEST: tl.constexpr = 2.0 ** (1 - NUM_EXPONENTS)
    relative = relative_tile(x, divisors, numel, block_numel, first, TILE)
    magnitude = tl.where(relative == relative, tl.abs(relative), 0.0)
    magnitude = tl.where(magnitude > 1, 1.0, magnitude)
    is_below = magnitude < SMALLEST
    mantissa = magnitude_bits(tl.where(is_below, magnitude + SMALLEST, magnitude))
    noise = (shared_tile(key, first, TILE) >> 9).to(tl.int32)
    exponent = ((mantissa + noise) >> 23) - is_below.to(tl.int32)
    code = (128 - exponent) & NUM_EXPONENTS
    is_negative = (relative.to(tl.int32, bitcast=True) < 0) & (code > 0)
    code += tl.where(is_negative, NUM_EXPONENTS + 1, 0)
    store_bytes(out, pack_tile(code, BITS, False, TILE), numel, BITS, TILE)


def signs_and_magnitude(x: torch.Tensor, out: torch.Tensor) -> float:
    _pack(x, out)
    return sum_of_magnitudes(x)


def signs_and_sums(x: torch.Tensor, out: torch.Tensor) -> tuple[int, float, float]:
    num_set = _pack(x, out).sum()
    if not x.numel():
        return 0, 0.0, 0.0
    above, below = (float(row_sums(x, x.numel(), term)) for term in ("positive", "negative"))
    return int(num_set), above, below


def _pack(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    # writes the bits of the signs; returns the number of bits that each program sets, int32 [num_programs]
    num_programs = triton.cdiv(x.numel(), SIGN_TILE)
    counts = torch.empty(num_programs, dtype=torch.int32, device=x.device)
    launch(_pack_signs, num_programs, x.contiguous(), out, counts, x.numel(), TILE=SIGN_TILE)
    return counts


@triton.jit
def _pack_signs(x, out, counts, numel, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_set = (tl.load(x + places, mask=places < numel, other=-1.0) >= 0).to(tl.int32)
    store_bytes(out, pack_tile(is_set, 1, False, TILE), numel, 1, TILE)
    tl.store(counts + tl.program_id(0), tl.sum(is_set, 0))


def ternary(x: torch.Tensor, threshold: float, bits: int) -> torch.Tensor:
    out = output_of(x, bits)
    launch(_ternary, triton.cdiv(x.numel(), TILE), x.contiguous(), out, x.numel(), threshold, BITS=bits, TILE=TILE)
    return out.view(torch.int8) if bits == LEVELS else out


def random_ternary(x: torch.Tensor, scale: float, key: int, bits: int, *, limit: float = math.inf) -> torch.Tensor:
    out = output_of(x, bits)
    launch(
        _random_ternary, triton.cdiv(x.numel(), TILE),
        x.contiguous(), out, x.numel(), scale, limit, key, BITS=bits, TILE=TILE,
    )  # fmt: skip
    return out.view(torch.int8) if bits == LEVELS else out


@triton.jit
def _ternary(x, out, numel, threshold, BITS: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    element = tl.load(x + places, mask=places < numel, other=0.0)
    bound = tl.zeros_like(element) + tl.cast(threshold, tl.float32)
    _store(out, (element >= bound).to(tl.int32) - (element <= -bound).to(tl.int32), numel, BITS, TILE)


@triton.jit(do_not_specialize=["key"])
def _random_ternary(x, out, numel, scale, limit, key, BITS: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    places = first + tl.arange(0, TILE)
    element = tl.load(x + places, mask=places < numel, other=0.0)
    most = tl.zeros_like(element) + tl.cast(limit, tl.float32)
    magnitude = tl.where(tl.abs(element) > most, most, tl.abs(element))
    is_chosen = uniform(shared_tile(key, first, TILE)) * tl.cast(scale, tl.float32) < magnitude
    sign = (element > 0).to(tl.int32) - (element < 0).to(tl.int32)
    _store(out, tl.where(is_chosen, sign, 0), numel, BITS, TILE)


@triton.jit
def _store(out, levels, numel, BITS: tl.constexpr, TILE: tl.constexpr):
    # stores levels as bytes, or as codes of two bits: 11 for +1, 10 for -1; a byte's first code is in its highest bits
    if BITS == 2:
        levels = (levels & 2) | (levels > 0).to(tl.int32) * 3
    store_bytes(out, pack_tile(levels, BITS, True, TILE), numel, BITS, TILE)
