"""Updates of residuals and momentum buffers; some also select entries in the same pass over memory."""

import itertools
from collections.abc import Sequence

import torch

from collectives.kernels.loop import (
    Double,
    DoubleArray,
    Float,
    FloatArray,
    Int,
    LongArray,
    Longs,
    Loop,
    addresses,
    longs,
)
from compressors.kernels.selection import (
    FEW,
    SPARE,
    level_bits,
    magnitudes_and_largest,
    reaching,
    sum_of_squares,
)

_ADD_SCALED = Loop("add_scaled", FloatArray, Float, FloatArray, Int, FloatArray)
_ACCELERATE_PARTS = Loop(
    "accelerate_parts", Longs, Longs, Int, FloatArray, FloatArray, Float, Int, FloatArray, FloatArray
)


def add(a: torch.Tensor, b: torch.Tensor, *, factor: float = 1.0, out: torch.Tensor) -> None:
    """Write a + factor * b to `out`, where the product is rounded before the addition.

    Args:
        a: floating [numel].
        b: fp32 [numel].
        factor: rounded to fp32.
        out: fp32 [numel], overwritten; may be `a` or `b`.
    """
    if _is_plain(a) and _ADD_SCALED.serves(a, b):
        _ADD_SCALED(a, factor, b, len(out), out)
    else:
        torch.add(a, b if factor == 1 else b * factor, out=out)


def accelerate(
    gradients: Sequence[torch.Tensor],
    velocity: torch.Tensor | None,
    residual: torch.Tensor | None,
    momentum: float,
    *,
    nesterov: bool,
    now: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the next momentum buffer, m u + g, to `now`, and the tensor to encode, now + residual, to `out`.

    With Nesterov momentum, the momentum buffer is m (u + g), and the tensor to encode is now + residual + g.

    Args:
        gradients: g, floating, 1-D; they correspond to consecutive parts of the other tensors.
        velocity: u, the momentum buffer of the previous step, fp32 [numel]; None for zeros.
        residual: fp32 [numel]; None for zeros.
        momentum: m, rounded to fp32.
        nesterov: True to use Nesterov momentum.
        now: fp32 [numel], overwritten; must not share memory with the other tensors.
        out: floating [numel], overwritten; must not share memory with the other tensors.
    """
    has_both = velocity is not None and residual is not None
    numels = [gradient.numel() for gradient in gradients]
    if has_both and all(map(_is_plain, gradients)) and _ACCELERATE_PARTS.serves(out, *gradients):
        borders, starts = longs([0, *itertools.accumulate(numels)]), addresses(gradients)
        _ACCELERATE_PARTS(starts, borders, len(gradients), velocity, residual, momentum, nesterov, now, out)
        return
    flat = (velocity, residual, now, out)
    parts = (tensor.split(numels) if tensor is not None else [None] * len(numels) for tensor in flat)
    for gradient, old, unsent, following, x in zip(gradients, *parts, strict=True):
        if old is None:
            following.copy_(gradient)
        else:
            add(gradient, old, factor=1.0 if nesterov else momentum, out=following)
        if nesterov:
            following.mul_(momentum)
        if unsent is None:
            x.copy_(following)
        else:
            add(following, unsent, out=x)
        if nesterov:
            add(gradient, x, out=x)


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


_MEASURE = Loop("add_and_measure", FloatArray, FloatArray, Int, FloatArray, FloatArray, returns=Double)
_FIND = Loop(
    "add_and_find", FloatArray, FloatArray, Int, Int, Int, LongArray, FloatArray, DoubleArray, FloatArray, returns=Int
)


# the result of `add_and_find`: (sum of squares, positions, values)
LargeEntries = tuple[float, torch.Tensor, torch.Tensor]


def add_and_measure(gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor) -> tuple[float, float]:
    """Write gradient + residual to `out`; return the sum of the magnitudes in `out`, and the largest of them.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: fp32 [numel].
        out: fp32 [numel], overwritten.

    Returns:
        The sum of |out| in fp64, and the largest |out|.
    """
    if _MEASURE.serves(gradient, residual):
        largest = torch.empty(1, dtype=torch.float32)
        return float(_MEASURE(gradient, residual, len(out), largest, out)), float(largest)
    torch.add(gradient, residual, out=out)
    return magnitudes_and_largest(out)


def add_and_find(gradient: torch.Tensor, residual: torch.Tensor, level: float, out: torch.Tensor) -> LargeEntries:
    """Write gradient + residual to `out`; return its sum of squares, and its entries of magnitude `level` or more.

    Args:
        gradient: fp32 [numel], contiguous.
        residual: fp32 [numel].
        level: the smallest magnitude of the entries to return.
        out: fp32 [numel], overwritten.

    Returns:
        The sum of squares in fp64; the positions of the entries, int64 [count], ascending; the entries, fp32 [count].
    """
    if _FIND.serves(gradient, residual):
        capacity = len(out) // FEW + SPARE
        positions, values = torch.empty(capacity, dtype=torch.int64), torch.empty(capacity, dtype=torch.float32)
        squares = torch.empty(1, dtype=torch.float64)
        count = _FIND(gradient, residual, len(out), level_bits(level), capacity, positions, values, squares, out)
        if count <= capacity:
            return float(squares), positions[:count], values[:count]
    else:
        torch.add(gradient, residual, out=out)
    return find(out, level)


def find(x: torch.Tensor, level: float) -> LargeEntries:
    """Return the sum of squares of `x`, and the positions and the values of the entries with |x| >= level.

    `x` is fp32 [numel]; the sum is in fp64; positions are int64, ascending; values are fp32.
    """
    positions = reaching(x, level)
    return sum_of_squares(x), positions, x.index_select(0, positions)
