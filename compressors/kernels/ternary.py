"""Three values per element: -1, 0, +1 times a scale, as bytes, or two bits each, four to a byte with the first on top.

Source: MXNet's two-bit gradient compression (Apache MXNet, src/kvstore/gradient_compression-inl.h): 11 is +, 10 is -,
00 is nothing sent; 01 never occurs.
"""

from __future__ import annotations

import math

import torch

from collectives.kernels.loop import ByteArray, Double, Float, FloatArray, Int, LongArray, Loop, also_on_gpus
from collectives.payloads.codec.bits import pack_bits
from collectives.payloads.codec.philox import shared_words
from collectives.payloads.codes import Codes
from compressors.kernels.random import uniform
from compressors.kernels.selection import folded_sum, limited

LEVELS, CODES = 8, 2
"""bits per element: levels of -1, 0 and +1 as int8, or codes"""

_TERNARY = Loop("pack_ternary", FloatArray, Int, Float, Int, ByteArray)
_TERNARY_AND_SUM = Loop("pack_ternary_and_sum", FloatArray, Int, Float, ByteArray, LongArray, returns=Double)
_OF_SUM = Loop("pack_ternary_of_sum", FloatArray, FloatArray, Int, Float, ByteArray, FloatArray)
_RANDOM = Loop("pack_random_ternary", FloatArray, Int, Float, Float, Int, Int, ByteArray)


@also_on_gpus
def ternary(x: torch.Tensor, threshold: float, bits: int) -> torch.Tensor:
    """+1 where x >= threshold, -1 where x <= -threshold, else 0.

    Args:
        x: fp32 [numel]; NaN becomes 0.
        threshold: rounded to fp32; > 0.
        bits: LEVELS for int8 [numel], CODES for uint8 [ceil(numel / 4)].
    """
    if _TERNARY.serves(x):
        out = _room(x, bits)
        _TERNARY(x.contiguous(), x.numel(), threshold, bits, out)
        return _as(bits, out)
    levels = (x >= threshold).to(torch.int8) - (x <= -threshold).to(torch.int8)
    return levels if bits == LEVELS else _codes_of(levels)


def ternary_of_sum(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: float, left: torch.Tensor
) -> torch.Tensor:
    """`ternary` codes of gradient + residual; `left` becomes what is left of it where a code stands for the threshold.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: likewise.
        threshold: of fp32 precision; > 0.
        left: fp32 [numel], overwritten; shares no memory with the others.
    """
    if _OF_SUM.serves(gradient, residual):
        out = _room(left, CODES)
        _OF_SUM(gradient, residual, left.numel(), threshold, out, left)
        return out
    torch.add(gradient, residual, out=left)
    levels = ternary(left, threshold, LEVELS)
    left.sub_((levels.float() * threshold).masked_fill_(levels == 0, 0.0))
    return _codes_of(levels)


def ternary_and_mean(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, float]:
    """`ternary` codes, and the mean of the magnitudes whose code is not 0, in fp64; 0 of none."""
    if _TERNARY_AND_SUM.serves(x):
        out, count = _room(x, CODES), torch.empty(1, dtype=torch.int64)
        total = float(_TERNARY_AND_SUM(x.contiguous(), x.numel(), threshold, out, count))
        return out, total / max(int(count), 1)
    levels = ternary(x, threshold, LEVELS)
    total = float(folded_sum(x.abs().double().masked_fill_(levels == 0, 0.0)))
    return _codes_of(levels), total / max(int(levels.count_nonzero()), 1)


@also_on_gpus
def random_ternary(x: torch.Tensor, scale: float, key: int, bits: int, *, limit: float = math.inf) -> torch.Tensor:
    """The sign of `x` with probability min(|x|, limit) / scale, else 0, by the random numbers of a key.

    Args:
        x: fp32 [numel]; NaN becomes 0.
        scale: of fp32 precision, >= 0.
        key: of the random numbers.
        bits: as above.
        limit: of fp32 precision.
    """
    if _RANDOM.serves(x):
        out = _room(x, bits)
        _RANDOM(x.contiguous(), x.numel(), limit, scale, key, bits, out)
        return _as(bits, out)
    is_chosen = uniform(shared_words(key, x.numel(), x.device)) * scale < limited(x, limit)
    levels = ((x > 0).to(torch.int8) - (x < 0).to(torch.int8)) * is_chosen
    return levels if bits == LEVELS else _codes_of(levels)


def ternary_payload(codes: torch.Tensor, numel: int, value: torch.Tensor) -> Codes:
    """Packed codes as a payload.

    Args:
        codes: uint8 [ceil(numel / 4)].
        numel: elements.
        value: fp32 [1], what a level of one stands for.
    """
    return Codes(numel, "ternary", CODES, codes, value)


def level_dtype(world_size: int) -> torch.dtype:
    """An integer type that holds the sum of `world_size` levels, and that backends can add."""
    return torch.int8 if world_size <= 127 else torch.int32


def _room(x: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.empty(x.numel(), dtype=torch.uint8) if bits == LEVELS else Codes.room(x.numel(), bits, x.device)


def _as(bits: int, out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int8) if bits == LEVELS else out


def _codes_of(levels: torch.Tensor) -> torch.Tensor:
    """Codes, packed: uint8 [ceil(numel / 4)] from int8 [numel]."""
    return pack_bits((levels != 0) * 2 + (levels > 0), CODES, first="high")
