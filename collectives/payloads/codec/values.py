"""Arithmetic on values in the dtype that is sent: sums in fp32, rounded once; fp16 saturates instead of overflowing."""

import functools
import math
from collections.abc import Callable, Iterator

import torch

from collectives.kernels.loop import Float, FloatArray, Int, Loop, also_on_gpus, array

LENGTH = 2**16


def cache_blocks(numel: int, device: torch.device) -> Iterator[slice]:
    """Yield slices that together cover `numel` elements: on a CPU short enough for the cache, on a GPU a single slice.

    Args:
        numel: number of elements.
        device: device of the elements.
    """
    step = LENGTH if device.type == "cpu" else max(1, numel)
    for start in range(0, numel, step):
        yield slice(start, min(start + step, numel))


_ROUND = {
    dtype: Loop(name, FloatArray, Int, Float, array(dtype))
    for dtype, name in ((torch.float16, "round_to_fp16"), (torch.bfloat16, "round_to_bf16"))
}
_KINDS = (torch.float32, *_ROUND)
SHORT = tuple(_ROUND)  # the 16-bit types, to which sums are rounded
_WRITE = Loop("write_values", array(*_KINDS), Int, Int, Float, FloatArray)
_SUM = {
    dtype: Loop(name, array(dtype), array(dtype), Int, Float, array(dtype))
    for dtype, name in ((torch.float16, "sum_fp16"), (torch.bfloat16, "sum_bf16"))
}


def to_value_dtype(
    x: torch.Tensor, dtype: torch.dtype, world_size: int = 1, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return `x` rounded to the dtype in which values are sent.

    Values beyond the range of a 16-bit dtype become its largest or smallest finite value; NaN stays NaN.

    Args:
        x: floating, any shape.
        dtype: dtype of the result.
        world_size: for fp16, values are clamped so that no sum over this many ranks overflows, in any order.
        out: tensor for the result, with this dtype and the shape of `x`; None for a new tensor.

    Raises:
        ValueError: fp16 cannot hold a sum over this many ranks.
    """
    if dtype not in SHORT or (x.dtype == dtype and world_size == 1):
        return x.to(dtype) if out is None else out.copy_(x)
    limit = value_limit(dtype, world_size)
    out = torch.empty(x.shape, dtype=dtype, device=x.device) if out is None else out
    if x.dtype == torch.float32 and x.is_contiguous() and out.is_contiguous():
        round_values(x, limit, out)
    else:
        out.copy_(x.clamp(-limit, limit))
    return out


@also_on_gpus
def round_values(x: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """Write fp32 `x`, clamped to +-limit and rounded to 16 bits, into `out`; both contiguous, with the same shape."""
    loop = _ROUND[out.dtype]
    if loop.serves(x):
        loop(x, x.numel(), limit, out)
    else:
        out.copy_(x.clamp(-limit, limit))


@functools.cache
def value_limit(dtype: torch.dtype, world_size: int) -> float:
    """Return the largest magnitude that a rank may send in this dtype, if values are summed over `world_size` ranks.

    For fp16, a sum of `world_size` terms up to this limit cannot overflow: the limit is a multiple of the coarsest
    spacing of fp16 numbers, so every partial sum of equal terms is exact. Rounding is monotone, so smaller terms cannot
    have a larger sum. The limit finfo.max / world_size would be too large: 65504 / 3 rounds up in fp16, and three times
    the rounded value overflows. For other dtypes the limit is their maximum.

    Raises:
        ValueError: no such limit above zero exists in fp16, because there are too many ranks.
    """
    info = torch.finfo(dtype)
    if dtype is not torch.float16:
        return info.max
    spacing = 2.0 ** math.floor(math.log2(info.max)) * info.eps
    limit = info.max // (world_size * spacing) * spacing
    if limit == 0:
        raise ValueError(f"{dtype} cannot hold a sum over {world_size} ranks; use bf16 or fp32 values")
    return float(limit)


def add_values(
    a: torch.Tensor,
    b: torch.Tensor,
    keep_lost: Callable[..., None] | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a + b in the wider of both dtypes: 16-bit sums are rounded once and saturate, integers wrap.

    If `keep_lost` is not None, it is called as (0, rounding errors of 16-bit sums in fp32, `positions`).
    """
    dtype = torch.promote_types(a.dtype, b.dtype)
    if dtype not in SHORT:
        return a + b
    if a.dtype == b.dtype and a.shape == b.shape:
        total = torch.empty(a.shape, dtype=dtype, device=a.device)
        sum_values(a.contiguous(), b.contiguous(), torch.finfo(dtype).max, total)
    else:
        total = to_value_dtype(a.float() + b.float(), dtype)
    if keep_lost is not None:
        keep_lost(0, lost_in_sum(a, b, total), positions)
    return total


def lost_in_sum(a: torch.Tensor, b: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the rounding error of `total`, the 16-bit sum of a and b: a + b minus `total`, fp32."""
    return (a.float() + b.float()).sub_(total)


@also_on_gpus
def sum_values(a: torch.Tensor, b: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """Write a + b, clamped to +-limit and rounded to 16 bits, into `out`; all contiguous, same dtype and shape."""
    loop = _SUM[out.dtype]
    if loop.serves(a, b):
        loop(a, b, a.numel(), limit, out)
    else:
        to_value_dtype(a.float() + b.float(), out.dtype, out=out)


def write_divided(values: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
    """Write `values` / divisor into `out`; `values` is floating [n], `out` is fp32 [n]."""
    if values.dtype in _KINDS and out.is_contiguous() and _WRITE.serves(values, out):
        _WRITE(values.contiguous(), _KINDS.index(values.dtype), values.numel(), divisor, out)
        return
    for part in cache_blocks(values.numel(), values.device):
        out[part].copy_(values[part]).div_(divisor)


def divided(values: torch.Tensor, divisor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return `values` / divisor in `dtype`, computed in fp32 or wider; may share memory with `values`."""
    wide = values.to(torch.promote_types(dtype, torch.float32))
    return (wide if divisor == 1 else wide / divisor).to(dtype)


def add_divided_(dense: torch.Tensor, values: torch.Tensor, divisor: float) -> None:
    """Add `values` / divisor to `dense` (mutated), both 1-D and equally long, without a temporary of full length."""
    if values.is_floating_point() and dense.dtype == torch.float32 and abs(math.frexp(divisor)[0]) == 0.5:
        dense.add_(values, alpha=1 / divisor)  # for a power of two this is exact, so it equals dividing
        return
    for part in cache_blocks(values.numel(), values.device):
        dense[part].add_(divided(values[part], divisor, dense.dtype))
