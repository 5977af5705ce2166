"""Quantisation: rounding and packing of elements, scales per block of consecutive elements, signs and ternary levels.

The last block may be shorter. A byte holds four ternary codes; the first code is in the highest bits.

Source: the ternary codes are those of MXNet's two-bit gradient compression (Apache MXNet,
src/kvstore/gradient_compression-inl.h): 11 is +1, 10 is -1, 00 is 0; 01 never occurs.
"""

import math

import torch

from collectives.kernels.loop import (
    ByteArray,
    Double,
    DoubleArray,
    Float,
    FloatArray,
    Int,
    IntArray,
    LongArray,
    Longs,
    Loop,
    Parts,
    also_on_gpus,
)
from collectives.payloads import Codes
from collectives.payloads.codec.bits import pack_bits, packed_nbytes
from collectives.payloads.codec.philox import shared_words, uniform
from collectives.payloads.sparse import BITS, NEGATIVE, levels
from compressors.kernels.selection import folded_sum, limited, magnitudes, sum_of_magnitudes

_MAXIMA = Loop("block_maxima", Longs, Longs, Int, Int, IntArray)
_SQUARES = Loop("block_squares", Longs, Longs, Int, Int, DoubleArray)


@also_on_gpus
def block_maxima(x: Parts, block_numel: int) -> torch.Tensor:
    """Return the largest magnitude of every block, NaN for a block with NaN: fp32 [ceil(numel / block_numel)]."""
    if _MAXIMA.serves(*x.tensors):
        maxima = torch.empty(-(-x.numel // block_numel), dtype=torch.int32)
        _MAXIMA(x.starts, x.borders, x.numel, block_numel, maxima)
    else:
        maxima = _per_block(x.flat.view(torch.int32) & 0x7FFFFFFF, block_numel).amax(1)
    return maxima.view(torch.float32)


@also_on_gpus
def block_squares(x: Parts, block_numel: int) -> torch.Tensor:
    """Return the sum of every block's squares, without overflow or underflow: fp64 [ceil(numel / block_numel)]."""
    if _SQUARES.serves(*x.tensors):
        squares = torch.empty(-(-x.numel // block_numel), dtype=torch.float64)
        _SQUARES(x.starts, x.borders, x.numel, block_numel, squares)
        return squares
    return folded_sum(_per_block(x.flat.double().square(), block_numel))


def block_norms(x: Parts, block_numel: int) -> torch.Tensor:
    """Return the L2 norm of every block: fp32 [ceil(numel / block_numel)]."""
    return block_squares(x, block_numel).sqrt_().clamp_(max=torch.finfo(torch.float32).max).float()


def relative_to_blocks(x: torch.Tensor, scales: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Return `x` with every element divided by the scale of its block, as a new tensor: fp32 [numel]."""
    return x / scales.repeat_interleave(min(block_numel, x.numel()))[: x.numel()]


def divisors(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales, fp32 [num_blocks], with 0 and NaN replaced by 1, so that one can divide by them."""
    return torch.where(scales > 0, scales, 1)


def _per_block(x: torch.Tensor, block_numel: int) -> torch.Tensor:
    # one block per row; the last row is padded with zeros: [num_blocks, min(block_numel, numel)]
    width = max(1, min(block_numel, x.numel()))
    return torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)


# For random rounding, a level is divided into this many parts: as fine as fp32 below 1, and 127 levels fit in an int32.
PART_BITS = 23
PARTS = 1 << PART_BITS

_PACK_LEVELS = Loop("pack_levels", Longs, Longs, Int, FloatArray, Int, Float, Float, Int, Int, Int, ByteArray)


@also_on_gpus
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
    """Write packed levels, x / scale * multiplier, to `out`; a level is rounded to the nearest integer or at random.

    Random rounding computes the level in units of 1 / `PARTS`, adds a random number in [0, PARTS), and rounds down.

    Args:
        x: [numel]; NaN becomes level 0.
        scales: fp32 [ceil(numel / block_numel)], >= 0.
        block_numel: elements per scale.
        bits: bits per level, 2, 4 or 8. Levels are clamped to +-(2^(bits - 1) - 1), because they may be too large if
            the scale is denormal.
        multiplier: number of levels between 0 and the scale.
        key: seed of the random numbers, 0..2^64 - 1; None to round to the nearest level, ties to even.
        out: uint8 [ceil(numel * bits / 8)], overwritten with two's complement codes of the codebook "levels".
    """
    most = (1 << (bits - 1)) - 1
    if _PACK_LEVELS.serves(*x.tensors, scales):
        _PACK_LEVELS(
            x.starts, x.borders, x.numel, divisors(scales), block_numel, multiplier, most, key is not None, key or 0,
            bits, out,
        )  # fmt: skip
        return
    relative = relative_to_blocks(x.flat, divisors(scales), block_numel)
    if key is None:
        levels = _within(relative * multiplier, most)
    else:
        parts = _within(relative * (PARTS * multiplier), PARTS * most)
        levels = (parts + (shared_words(key, x.numel, x.device) >> (32 - PART_BITS))) >> PART_BITS
    out.copy_(pack_bits(levels.to(torch.int8), bits))


def _within(x: torch.Tensor, most: int) -> torch.Tensor:
    # rounds to the nearest integers, ties to even: int64; overwrites `x`
    return x.clamp_(-most, most).nan_to_num_(nan=0.0).round_().to(torch.int64)


MANTISSA_BITS = 23  # of fp32
EXPONENT_OF_ONE = 127  # the biased exponent of 2^0 in fp32

_PACK_POWERS = Loop("pack_powers", Longs, Longs, Int, FloatArray, Int, Int, Int, ByteArray)


@also_on_gpus
def pack_powers(x: Parts, scales: torch.Tensor, block_numel: int, *, bits: int, key: int, out: torch.Tensor) -> None:
    """Write packed codes of x / scale, rounded at random, without bias, to a power of two, to `out`.

    A random number is added to the bits of the mantissa; the carry increments the exponent with the right probability.
    An element below the smallest power that a code can express becomes this power or zero.

    Args:
        x: [numel]; NaN becomes 0.
        scales: fp32 [ceil(numel / block_numel)], powers of two at or above the magnitudes of their blocks, or 0.
        block_numel: elements per scale.
        bits: bits per code, 4 or 8.
        key: seed of the random numbers, 0..2^64 - 1.
        out: uint8 [ceil(numel * bits / 8)], overwritten with codes of the codebook "natural".
    """
    if _PACK_POWERS.serves(*x.tensors, scales):
        _PACK_POWERS(x.starts, x.borders, x.numel, divisors(scales), block_numel, key, bits, out)
        return
    relative = relative_to_blocks(x.flat, divisors(scales), block_numel)
    magnitude = relative.abs().nan_to_num_(nan=0.0).clamp_(max=1)
    num_exponents = (1 << (bits - 1)) - 1
    smallest = 2.0 ** (1 - num_exponents)
    is_below = magnitude < smallest
    mantissa = (magnitude + is_below.float() * smallest).view(torch.int32)  # if below: the share of the smallest power
    noise = shared_words(key, x.numel, x.device) >> (32 - MANTISSA_BITS)
    exponent = ((mantissa + noise) >> MANTISSA_BITS) - is_below.int()
    codes = (EXPONENT_OF_ONE + 1 - exponent) & num_exponents
    is_negative = relative.signbit() & (codes > 0)
    out.copy_(pack_bits(codes + is_negative * (num_exponents + 1), bits))


_PACK_NEAREST = Loop("pack_nearest_levels", FloatArray, Int, Double, Double, ByteArray)


def pack_nearest_levels(x: torch.Tensor, low: float, ratio: float) -> torch.Tensor:
    """Return the codes of a `SparseLevels` payload; each value gets the nearest level: uint8 [ceil(count / 2)].

    Args:
        x: fp32 [count]. A tie goes to the larger magnitude; NaN counts as infinite.
        low: smallest level, > 0, exact in fp32.
        ratio: each level divided by the next smaller level, >= 1, exact in fp32.
    """
    if _PACK_NEAREST.serves(x):
        packed = torch.empty(packed_nbytes(len(x), BITS), dtype=torch.uint8)
        _PACK_NEAREST(x, len(x), low, ratio, packed)
        return packed
    row = torch.tensor(levels(low, ratio), dtype=torch.float64)
    middles = ((row[1:] + row[:-1]) / 2).float().to(x.device)
    return pack_bits(torch.bucketize(magnitudes(x), middles, right=True) + NEGATIVE * (x < 0), BITS)


_WITH_MAGNITUDE = Loop("signs_and_magnitude", FloatArray, Int, ByteArray, returns=Double)
_WITH_SUMS = Loop("signs_and_sums", FloatArray, Int, ByteArray, DoubleArray, returns=Int)


@also_on_gpus
def signs_and_magnitude(x: torch.Tensor, out: torch.Tensor) -> float:
    """Write one bit per element to `out`, uint8 [ceil(numel / 8)]: 1 if x >= 0, otherwise 0, also for NaN.

    Return the sum of the magnitudes of `x`, computed in fp64.
    """
    if _WITH_MAGNITUDE.serves(x):
        return float(_WITH_MAGNITUDE(x.contiguous(), x.numel(), out))
    out.copy_(pack_bits(x >= 0, 1))
    return sum_of_magnitudes(x)


@also_on_gpus
def signs_and_sums(x: torch.Tensor, out: torch.Tensor) -> tuple[int, float, float]:
    """Write one bit per element to `out`, uint8 [ceil(numel / 8)]: 1 if x >= 0, otherwise 0, also for NaN.

    Returns:
        The number of bits that are 1, the sum of the elements with bit 1, and the sum of the elements with bit 0; the
        sums are computed in fp64.
    """
    if _WITH_SUMS.serves(x):
        sums = torch.empty(2, dtype=torch.float64)
        num_set = _WITH_SUMS(x.contiguous(), x.numel(), out, sums)
        return num_set, float(sums[0]), float(sums[1])
    is_set = x >= 0
    above, below = (folded_sum(torch.where(where, x, 0.0).double()) for where in (is_set, ~is_set))
    out.copy_(pack_bits(is_set, 1))
    return int(is_set.sum()), float(above), float(below)


LEVELS, CODES = 8, 2  # bits per element: of int8 levels, and of codes

_TERNARY = Loop("pack_ternary", FloatArray, Int, Float, Int, ByteArray)
_TERNARY_AND_SUM = Loop("pack_ternary_and_sum", FloatArray, Int, Float, ByteArray, LongArray, returns=Double)
_OF_SUM = Loop("pack_ternary_of_sum", FloatArray, FloatArray, Int, Float, ByteArray, FloatArray)
_RANDOM = Loop("pack_random_ternary", FloatArray, Int, Float, Float, Int, Int, ByteArray)


@also_on_gpus
def ternary(x: torch.Tensor, threshold: float, bits: int) -> torch.Tensor:
    """Return +1 if x >= threshold, -1 if x <= -threshold, else 0, for each element.

    Args:
        x: fp32 [numel]; NaN becomes 0.
        threshold: > 0; rounded to fp32.
        bits: LEVELS to return int8 [numel], CODES to return uint8 [ceil(numel / 4)].
    """
    if _TERNARY.serves(x):
        out = output_of(x, bits)
        _TERNARY(x.contiguous(), x.numel(), threshold, bits, out)
        return out.view(torch.int8) if bits == LEVELS else out
    levels = (x >= threshold).to(torch.int8) - (x <= -threshold).to(torch.int8)
    return levels if bits == LEVELS else _codes_of(levels)


def ternary_of_sum(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: float, left: torch.Tensor
) -> torch.Tensor:
    """Return packed ternary codes of gradient + residual, and write the sum minus the decoded codes to `left`.

    The codes, uint8 [ceil(numel / 4)], are those of `ternary`: the sign if the magnitude reaches the threshold, else 0.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: fp32 [numel], contiguous.
        threshold: > 0, exact in fp32; the code of +1 is decoded to it.
        left: fp32 [numel], overwritten; must not share memory with the other tensors.
    """
    out = output_of(left, CODES)
    _OF_SUM(gradient, residual, left.numel(), threshold, out, left)
    return out


def ternary_and_mean(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, float]:
    """Return the packed codes of `ternary`, and the mean magnitude of the elements whose code is not 0.

    The codes are uint8 [ceil(numel / 4)]; the mean is 0 if all codes are 0.
    """
    if _TERNARY_AND_SUM.serves(x):
        out, count = output_of(x, CODES), torch.empty(1, dtype=torch.int64)
        total = float(_TERNARY_AND_SUM(x.contiguous(), x.numel(), threshold, out, count))
        return out, total / max(int(count), 1)
    levels = ternary(x, threshold, LEVELS)
    total = float(folded_sum(x.abs().double().masked_fill_(levels == 0, 0.0)))
    return _codes_of(levels), total / max(int(levels.count_nonzero()), 1)


@also_on_gpus
def random_ternary(x: torch.Tensor, scale: float, key: int, bits: int, *, limit: float = math.inf) -> torch.Tensor:
    """Return a random ternary value per element: the element's sign with probability min(|x|, limit) / scale, else 0.

    Args:
        x: fp32 [numel]; NaN becomes 0.
        scale: >= 0, exact in fp32.
        key: seed of the random numbers, 0..2^64 - 1.
        bits: LEVELS to return int8 [numel], CODES to return packed codes, uint8 [ceil(numel / 4)].
        limit: exact in fp32.
    """
    if _RANDOM.serves(x):
        out = output_of(x, bits)
        _RANDOM(x.contiguous(), x.numel(), limit, scale, key, bits, out)
        return out.view(torch.int8) if bits == LEVELS else out
    is_chosen = uniform(shared_words(key, x.numel(), x.device)) * scale < limited(x, limit)
    levels = ((x > 0).to(torch.int8) - (x < 0).to(torch.int8)) * is_chosen
    return levels if bits == LEVELS else _codes_of(levels)


def level_dtype(world_size: int) -> torch.dtype:
    """Return an integer type that can hold the sum of `world_size` levels in -1..1, and that backends can add."""
    return torch.int8 if world_size <= 127 else torch.int32


def output_of(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Return an uninitialised uint8 tensor for the levels (bits = LEVELS) or the packed codes (CODES) of `x`."""
    return (
        x.new_empty(x.numel(), dtype=torch.uint8) if bits == LEVELS else Codes.room_for_codes(x.numel(), bits, x.device)
    )


def _codes_of(levels: torch.Tensor) -> torch.Tensor:
    return pack_bits((levels != 0) * 2 + (levels > 0), CODES, first="high")
