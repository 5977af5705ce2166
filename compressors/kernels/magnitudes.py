"""Magnitudes, and sums over them in fp64 in an order of their own, which is the same wherever they are computed."""

from __future__ import annotations

import ctypes
import math
import struct

import torch

from collectives.kernels.loop import Double, Float, FloatArray, Int, Loop, also_on_gpus

STRETCH = 1024

INFINITE = 0x7F800000  # its bits

_SUM_OF_SQUARES = Loop("sum_of_squares", FloatArray, Int, Float, returns=Double)
_SUM_OF_LIMITED = Loop("sum_of_limited", FloatArray, Int, Float, returns=Double)
_SUM_OF_REACHING = Loop("sum_of_reaching", FloatArray, Int, Float, returns=Double)
_LARGEST = Loop("largest_magnitude", FloatArray, Int, returns=Float)
_RANGE = Loop("magnitude_range", FloatArray, Int, FloatArray)
_MAGNITUDES_AND_LARGEST = Loop("magnitudes_and_largest", FloatArray, Int, FloatArray, returns=Double)
_SQUARES_AND_LARGEST = Loop("squares_and_largest", FloatArray, Int, FloatArray, returns=Double)


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """|x|, NaN as infinity: fp32 of the same shape, freshly made."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def magnitude_bits(level: float) -> int:
    """The bits of a magnitude as an integer: they are ordered as the magnitudes are. Below zero as zero, NaN as inf."""
    if math.isnan(level):
        return INFINITE
    nearest = ctypes.c_float(max(level, 0.0)).value  # infinite where fp32 has no such number
    return int(struct.unpack("<i", struct.pack("<f", abs(nearest)))[0])


@also_on_gpus
def largest_magnitude(x: torch.Tensor) -> float:
    """The largest |x| of fp32 [numel], 0 of none; NaN counts as infinite."""
    if _LARGEST.serves(x):
        return float(_LARGEST(x, x.numel()))
    return float(magnitudes(x).amax()) if x.numel() else 0.0


def magnitude_range(x: torch.Tensor) -> tuple[float, float]:
    """The smallest and the largest |x| of fp32 [numel], numel >= 1; NaN counts as infinite."""
    if _RANGE.serves(x):
        extremes = torch.empty(2, dtype=torch.float32)
        _RANGE(x, x.numel(), extremes)
    else:
        extremes = torch.stack(magnitudes(x).aminmax())
    smallest, largest = extremes.tolist()
    return smallest, largest


def limited(x: torch.Tensor, limit: float) -> torch.Tensor:
    """min(|x|, limit), NaN as it is, for a limit >= 0: fp32 of the same shape, freshly made."""
    most = x.new_tensor(limit)
    return torch.where(x.abs() > most, most, x.abs())


@also_on_gpus
def sum_of_squares(x: torch.Tensor, limit: float = math.inf) -> float:
    """The sum of min(|x|, limit)^2 of fp32 [numel], in fp64: it neither overflows nor vanishes."""
    if _SUM_OF_SQUARES.serves(x):
        return float(_SUM_OF_SQUARES(x, x.numel(), limit))
    return float(folded_sum(limited(x, limit).double().square()))


@also_on_gpus
def sum_of_limited(x: torch.Tensor, limit: float) -> float:
    """The sum of min(|x|, limit) of fp32 [numel], in fp64."""
    if _SUM_OF_LIMITED.serves(x):
        return float(_SUM_OF_LIMITED(x, x.numel(), limit))
    return float(folded_sum(limited(x, limit).double()))


@also_on_gpus
def sum_of_magnitudes(x: torch.Tensor, level: float = 0.0) -> float:
    """The sum of those |x| that reach `level`, of fp32 [numel], in fp64."""
    bound = magnitude_bits(level)
    if _SUM_OF_REACHING.serves(x):
        return float(_SUM_OF_REACHING(x, x.numel(), *struct.unpack("<f", struct.pack("<i", bound))))
    reaches = magnitudes(x).view(torch.int32) >= bound
    return float(folded_sum(x.abs().double().masked_fill_(~reaches, 0.0)))


@also_on_gpus
def magnitudes_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """`sum_of_magnitudes` and `largest_magnitude` in one pass."""
    if _MAGNITUDES_AND_LARGEST.serves(x):
        largest = torch.empty(1, dtype=torch.float32)
        return float(_MAGNITUDES_AND_LARGEST(x, x.numel(), largest)), float(largest)
    return sum_of_magnitudes(x), largest_magnitude(x)


@also_on_gpus
def squares_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """`sum_of_squares` and `largest_magnitude` in one pass."""
    if _SQUARES_AND_LARGEST.serves(x):
        largest = torch.empty(1, dtype=torch.float32)
        return float(_SQUARES_AND_LARGEST(x, x.numel(), largest)), float(largest)
    return sum_of_squares(x), largest_magnitude(x)


def root_mean_square(x: torch.Tensor) -> float:
    """The root mean square of fp32 [numel], numel >= 1."""
    return math.sqrt(sum_of_squares(x) / x.numel())


def folded_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sums along the last dimension of fp64 [..., n], none of whose terms is -0.0: fp64 [...].

    Stretches of 1024 terms, the last one filled up with zeros, are folded in half, the upper half onto the lower, until
    one is left; then the sums of the stretches likewise.
    """
    while terms.shape[-1] > 1:
        terms = torch.nn.functional.pad(terms, (0, -terms.shape[-1] % STRETCH)).unflatten(-1, (-1, STRETCH))
        while terms.shape[-1] > 1:
            lower, upper = terms.chunk(2, dim=-1)
            terms = lower + upper
        terms = terms.squeeze(-1)
    return terms.sum(-1)  # of one or none
