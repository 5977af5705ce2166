"""Sums of what a rank keeps from step to step, in one pass over memory."""

from __future__ import annotations

import dataclasses

import torch

from collectives.kernels.loop import (
    Double,
    DoubleArray,
    Float,
    FloatArray,
    Int,
    IntArray,
    LongArray,
    Loop,
    also_on_gpus,
    array,
)
from collectives.payloads.codec.values import to_value_dtype, value_limit
from compressors.kernels.selection import (
    FEW,
    SPARE,
    TYPES,
    candidates_room,
    magnitude_bits,
    magnitudes_and_largest,
    reaching,
    sum_of_squares,
    top_k,
)

_ADD_SCALED = Loop("add_scaled", FloatArray, Float, FloatArray, Int, FloatArray)
_ACCELERATE = Loop("accelerate", FloatArray, FloatArray, FloatArray, Float, Int, Int, FloatArray, FloatArray)


@also_on_gpus
def add(a: torch.Tensor, b: torch.Tensor, *, factor: float = 1.0, out: torch.Tensor) -> None:
    """Write a + factor * b, the product rounded before it is added.

    Args:
        a: floating, 1-D.
        b: fp32, as long.
        factor: rounded to fp32.
        out: fp32, as long, overwritten; may be `a` or `b`.
    """
    if _is_plain(a) and _ADD_SCALED.serves(a, b):
        _ADD_SCALED(a, factor, b, len(out), out)
    else:
        torch.add(a, b if factor == 1 else b * factor, out=out)


def accelerate(
    gradient: torch.Tensor,
    velocity: torch.Tensor | None,
    residual: torch.Tensor | None,
    momentum: float,
    *,
    nesterov: bool,
    now: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the velocity's next value m u + g to `now`, and what is to be sent of it, now + residual, to `out`.

    With nesterov the velocity is m (u + g), and what is to be sent has the gradient once more.

    Args:
        gradient: floating, 1-D.
        velocity: u, fp32, as long; None for zeros.
        residual: fp32, as long; None for zeros.
        momentum: m, rounded to fp32.
        nesterov: as above.
        now: fp32, as long, overwritten; may share no memory with the others.
        out: likewise.
    """
    is_first = velocity is None or residual is None
    if not is_first and _is_plain(gradient) and _ACCELERATE.serves(gradient, now, out):
        _ACCELERATE(gradient, velocity, residual, momentum, nesterov, len(out), now, out)
        return
    if velocity is None:
        now.copy_(gradient)
    else:
        add(gradient, velocity, factor=1.0 if nesterov else momentum, out=now)
    if nesterov:
        now.mul_(momentum)
    if residual is None:
        out.copy_(now)
    else:
        add(now, residual, out=out)
    if nesterov:
        add(gradient, out, out=out)


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


_MEASURE = Loop("add_and_measure", FloatArray, FloatArray, Int, FloatArray, FloatArray, returns=Double)
_FIND = Loop(
    "add_and_find", FloatArray, FloatArray, Int, Int, Int, LongArray, FloatArray, DoubleArray, FloatArray, returns=Int
)
_SEND_TOP_K = {
    dtype: Loop(
        "send_top_k", FloatArray, FloatArray, Int, Int, Int, Float, LongArray, FloatArray, array(dtype), Int, LongArray,
        IntArray, FloatArray, returns=Int,
    )
    for dtype in TYPES
}  # fmt: skip
_TOP_K = Loop(
    "add_and_top_k", FloatArray, FloatArray, Int, Int, LongArray, FloatArray, Int, LongArray, IntArray, FloatArray
)


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
        largest = torch.empty(1, dtype=torch.float32)
        return float(_MEASURE(gradient, residual, len(out), largest, out)), float(largest)
    torch.add(gradient, residual, out=out)
    return magnitudes_and_largest(out)


def add_and_find(gradient: torch.Tensor, residual: torch.Tensor, level: float, out: torch.Tensor) -> Found:
    """Write gradient + residual, and find what of it reaches a level; arguments as above, level as in `reaching`."""
    if _FIND.serves(gradient, residual):
        room = len(out) // FEW + SPARE
        positions, values = torch.empty(room, dtype=torch.int64), torch.empty(room, dtype=torch.float32)
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
        positions, values = torch.empty(k, dtype=torch.int64), torch.empty(k, dtype=torch.float32)
        _TOP_K(gradient, residual, len(out), k, positions, values, *candidates_room(len(out), k), out)
        return positions, values
    torch.add(gradient, residual, out=out)
    positions = top_k(out, k)
    return positions, out.index_select(0, positions)


def send_top_k(
    gradient: torch.Tensor, residual: torch.Tensor, left: torch.Tensor, k: int, dtype: torch.dtype, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Of gradient + residual the k largest, in the type they travel in; the rest goes to `left`.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: fp32 [numel].
        left: fp32 [numel], overwritten with the sum minus the values.
        k: 1 <= k <= numel.
        dtype: of `TYPES`.
        world_size: as in `to_value_dtype`.

    Returns:
        positions, ascending, int64 [at most k], and the values there, none of which is zero; and whether all of the sum
        is finite: where it is not, nothing of this counts.
    """
    if _SEND_TOP_K[dtype].serves(gradient, residual):
        positions, sums = torch.empty(k, dtype=torch.int64), torch.empty(k, dtype=torch.float32)
        values, limit = torch.empty(k, dtype=dtype), value_limit(dtype, world_size)
        count = _SEND_TOP_K[dtype](
            gradient, residual, len(left), k, TYPES.index(dtype), limit, positions, sums, values,
            *candidates_room(len(left), k), left,
        )  # fmt: skip
        return positions[:count], values[:count], count >= 0
    positions, sums = add_and_top_k(gradient, residual, k, left)
    values = to_value_dtype(sums, dtype, world_size) + 0
    left.index_copy_(0, positions, sums - values)
    return positions[values != 0], values[values != 0], bool(sums.isfinite().all())


def find(x: torch.Tensor, level: float) -> Found:
    """The same of a sum that is there already, fp32 [numel], contiguous."""
    positions = reaching(x, level)
    return Found(sum_of_squares(x), positions, x.index_select(0, positions))
