"""Sums of magnitudes, and the largest."""

import math

import torch

from compressors.kernels.magnitudes import magnitude_bits
from compressors.kernels.triton.rows import row_maxima, row_sums

INFINITE = 0x7F800000


def largest_magnitude(x: torch.Tensor) -> float:
    """0 of none; NaN counts as infinite."""
    return float(row_maxima(x, x.numel()).clamp_(max=INFINITE).view(torch.float32)) if x.numel() else 0.0


def sum_of_squares(x: torch.Tensor, limit: float = math.inf) -> float:
    """Of min(|x|, limit)."""
    return _sum(x, "square", limit)


def sum_of_limited(x: torch.Tensor, limit: float) -> float:
    """Of min(|x|, limit)."""
    return _sum(x, "limited", limit)


def sum_of_magnitudes(x: torch.Tensor, level: float = 0.0) -> float:
    """Of those that reach the level."""
    reached = torch.tensor(magnitude_bits(level), dtype=torch.int32).view(torch.float32)
    return _sum(x, "reaching", float(reached))


def magnitudes_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """Two kernels."""
    return sum_of_magnitudes(x), largest_magnitude(x)


def squares_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """Two kernels."""
    return sum_of_squares(x), largest_magnitude(x)


def _sum(x: torch.Tensor, term: str, parameter: float) -> float:
    return float(row_sums(x, x.numel(), term, parameter)) if x.numel() else 0.0
