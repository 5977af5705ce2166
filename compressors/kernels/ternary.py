"""Rounding of elements to -1, 0 or +1, stored as int8 levels or as codes of two bits.

A byte holds four codes, the first one in the highest bits.

Source: MXNet's two-bit gradient compression (Apache MXNet, src/kvstore/gradient_compression-inl.h): 11 is +1, 10 is -1,
00 is 0; 01 never occurs.
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

LEVELS, CODES = 8, 2  # bits per element: int8 levels, or codes

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
        out = _output(x, bits)
        _TERNARY(x.contiguous(), x.numel(), threshold, bits, out)
        return _typed(bits, out)
    levels = (x >= threshold).to(torch.int8) - (x <= -threshold).to(torch.int8)
    return levels if bits == LEVELS else _codes_of(levels)


def ternary_of_sum(
    gradient: torch.Tensor, residual: torch.Tensor, threshold: float, left: torch.Tensor
) -> torch.Tensor:
    """Return the `ternary` codes of gradient + residual, and write the sum minus the decoded codes to `left`.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: fp32 [numel], contiguous.
        threshold: > 0, exact in fp32; the decoded value of a code of +1.
        left: fp32 [numel], overwritten; shares no memory with the others.
    """
    if _OF_SUM.serves(gradient, residual):
        out = _output(left, CODES)
        _OF_SUM(gradient, residual, left.numel(), threshold, out, left)
        return out
    torch.add(gradient, residual, out=left)
    levels = ternary(left, threshold, LEVELS)
    left.sub_((levels.float() * threshold).masked_fill_(levels == 0, 0.0))
    return _codes_of(levels)


def ternary_and_mean(x: torch.Tensor, threshold: float) -> tuple[torch.Tensor, float]:
    """Return the `ternary` codes, and the mean magnitude of the elements whose code is not 0; 0 if there are none."""
    if _TERNARY_AND_SUM.serves(x):
        out, count = _output(x, CODES), torch.empty(1, dtype=torch.int64)
        total = float(_TERNARY_AND_SUM(x.contiguous(), x.numel(), threshold, out, count))
        return out, total / max(int(count), 1)
    levels = ternary(x, threshold, LEVELS)
    total = float(folded_sum(x.abs().double().masked_fill_(levels == 0, 0.0)))
    return _codes_of(levels), total / max(int(levels.count_nonzero()), 1)


@also_on_gpus
def random_ternary(x: torch.Tensor, scale: float, key: int, bits: int, *, limit: float = math.inf) -> torch.Tensor:
    """Return the sign of each element with probability min(|x|, limit) / scale, else 0.

    Args:
        x: fp32 [numel]; NaN becomes 0.
        scale: >= 0, exact in fp32.
        key: key of the random numbers.
        bits: as in `ternary`.
        limit: exact in fp32.
    """
    if _RANDOM.serves(x):
        out = _output(x, bits)
        _RANDOM(x.contiguous(), x.numel(), limit, scale, key, bits, out)
        return _typed(bits, out)
    is_chosen = uniform(shared_words(key, x.numel(), x.device)) * scale < limited(x, limit)
    levels = ((x > 0).to(torch.int8) - (x < 0).to(torch.int8)) * is_chosen
    return levels if bits == LEVELS else _codes_of(levels)


def ternary_payload(codes: torch.Tensor, numel: int, value: torch.Tensor) -> Codes:
    """Return a payload of codes.

    Args:
        codes: uint8 [ceil(numel / 4)].
        numel: number of elements.
        value: fp32 [1], the decoded value of a code of +1.
    """
    return Codes(numel, "ternary", CODES, codes, value)


def level_dtype(world_size: int) -> torch.dtype:
    """Return an integer type that can hold the sum of `world_size` levels, and that backends can add."""
    return torch.int8 if world_size <= 127 else torch.int32


def _output(x: torch.Tensor, bits: int) -> torch.Tensor:
    return torch.empty(x.numel(), dtype=torch.uint8) if bits == LEVELS else Codes.room(x.numel(), bits, x.device)


def _typed(bits: int, out: torch.Tensor) -> torch.Tensor:
    return out.view(torch.int8) if bits == LEVELS else out


def _codes_of(levels: torch.Tensor) -> torch.Tensor:
    """Pack int8 levels [numel] into codes, uint8 [ceil(numel / 4)]."""
    return pack_bits((levels != 0) * 2 + (levels > 0), CODES, first="high")
