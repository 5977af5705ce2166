"""Gradient and residual added, and what a method needs to know of the sum, found in the same pass over memory."""

from __future__ import annotations

import dataclasses

import torch

from collectives.kernels.loop import Double, Int, Loop, array
from compressors.kernels.magnitudes import magnitude_bits, magnitudes_and_largest, sum_of_squares
from compressors.kernels.selection import FEW, SPARE, candidates_room, reaching, top_k

_FLOATS, _LONGS, _DOUBLES = array(torch.float32), array(torch.int64), array(torch.float64)
_MEASURE = Loop("add_and_measure", _FLOATS, _FLOATS, Int, _FLOATS, _FLOATS, returns=Double)
_FIND = Loop("add_and_find", _FLOATS, _FLOATS, Int, Int, Int, _LONGS, _FLOATS, _DOUBLES, _FLOATS, returns=Int)
_TOP_K = Loop("add_and_top_k", _FLOATS, _FLOATS, Int, Int, _LONGS, _FLOATS, Int, _LONGS, array(torch.int32), _FLOATS)


@dataclasses.dataclass(frozen=True)
class Found:
    """What `add_and_find` and `find` found.

    Attributes:
        squares: the sum of all squares, in fp64.
        positions: of the magnitudes that reach the level, int64 [count], ascending.
        values: what is there, fp32 [count].
    """

    squares: float
    positions: torch.Tensor
    values: torch.Tensor


def add_and_measure(gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
    """Write gradient + residual.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: fp32 [numel].
        out: fp32 [numel], overwritten.

    Returns:
        `magnitudes_and_largest` of it.
    """
    if _MEASURE.serves(gradient, residual):
        largest = torch.empty(1)
        return float(_MEASURE(gradient, residual, len(out), largest, out)), float(largest)
    torch.add(gradient, residual, out=out)
    return magnitudes_and_largest(out)


def add_and_find(gradient: torch.Tensor, residual: torch.Tensor, level: float, out: torch.Tensor) -> Found:
    """Write gradient + residual, and find what of it reaches a level; arguments as above, level as in `reaching`."""
    if _FIND.serves(gradient, residual):
        room = len(out) // FEW + SPARE
        positions, values = torch.empty(room, dtype=torch.int64), torch.empty(room)
        squares = torch.empty(1, dtype=torch.float64)
        count = _FIND(gradient, residual, len(out), magnitude_bits(level), room, positions, values, squares, out)
        if count <= room:
            return Found(float(squares), positions[:count], values[:count])
    else:
        torch.add(gradient, residual, out=out)
    return find(out, level)


def add_and_top_k(
    gradient: torch.Tensor, residual: torch.Tensor, k: int, out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write gradient + residual; returns `top_k` of it, k at least 1, and the values there. Arguments as above."""
    if _TOP_K.serves(gradient, residual):
        positions, values = torch.empty(k, dtype=torch.int64), torch.empty(k)
        _TOP_K(gradient, residual, len(out), k, positions, values, *candidates_room(len(out), k), out)
        return positions, values
    torch.add(gradient, residual, out=out)
    positions = top_k(out, k)
    return positions, out.index_select(0, positions)


def find(x: torch.Tensor, level: float) -> Found:
    """The same of a sum that is there already, fp32 [numel], contiguous."""
    positions = reaching(x, level)
    return Found(sum_of_squares(x), positions, x.index_select(0, positions))
