"""Magnitudes, and sums over them in an order of their own, which is the same wherever they are computed.

Sums are in fp64, over blocks of 64 rows of 1024 elements: in a block a sum per lane, row after row, then the upper half
of the lanes onto the lower until one is left; then the blocks' sums, one after the other.
"""

from __future__ import annotations

import math

import torch

from collectives.kernels.loop import Double, Float, Int, Loop, array

ROWS, LANES = 64, 1024

_FLOATS = array(torch.float32)
_SUM_OF_SQUARES = Loop("sum_of_squares", _FLOATS, Int, returns=Double)
_SUM_OF_MAGNITUDES = Loop("sum_of_magnitudes", _FLOATS, Int, Int, returns=Double)
_LARGEST = Loop("largest_magnitude", _FLOATS, Int, returns=Float)


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """|x|, NaN as infinity: fp32 of the same shape, freshly made."""
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)


def magnitude_bits(level: float) -> int:
    """The bits of a magnitude as an integer: they are ordered as the magnitudes are. Below zero as zero, NaN as inf."""
    return int(magnitudes(torch.tensor([level if not level < 0 else 0.0])).view(torch.int32))


def largest_magnitude(x: torch.Tensor) -> float:
    """The largest |x| of fp32 [numel], 0 of none; NaN counts as infinite."""
    if _LARGEST.serves(x):
        return float(_LARGEST(x, x.numel()))
    return float(magnitudes(x).amax()) if x.numel() else 0.0


def sum_of_squares(x: torch.Tensor) -> float:
    """The sum of squares of fp32 [numel], in fp64: it neither overflows nor vanishes."""
    if _SUM_OF_SQUARES.serves(x):
        return float(_SUM_OF_SQUARES(x, x.numel()))
    return _sum_in_blocks(x.double().square())


def sum_of_magnitudes(x: torch.Tensor, level: float = 0.0) -> float:
    """The sum of those |x| that reach `level`, of fp32 [numel], in fp64."""
    if _SUM_OF_MAGNITUDES.serves(x):
        return float(_SUM_OF_MAGNITUDES(x, x.numel(), magnitude_bits(level)))
    reaches = magnitudes(x).view(torch.int32) >= magnitude_bits(level)
    return _sum_in_blocks(x.abs().double().masked_fill_(~reaches, 0.0))


def root_mean_square(x: torch.Tensor) -> float:
    """The root mean square of fp32 [numel], numel >= 1."""
    return math.sqrt(sum_of_squares(x) / x.numel())


def _sum_in_blocks(terms: torch.Tensor) -> float:
    """The sum of fp64 [numel], all >= 0 or NaN, in the order that the module's docstring gives."""
    num_blocks = -(-terms.numel() // (ROWS * LANES))
    padded = terms.new_zeros(num_blocks, ROWS, LANES)
    padded.view(-1)[: terms.numel()] = terms
    lanes = padded.new_zeros(num_blocks, LANES)
    for row in range(ROWS):
        lanes += padded[:, row]
    while lanes.shape[1] > 1:
        lower, upper = lanes.chunk(2, dim=1)
        lanes = lower + upper
    total = 0.0
    for block in lanes.view(-1).tolist():
        total += block
    return total
