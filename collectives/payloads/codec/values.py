"""Arithmetic on values in the type that is sent: sums in fp32, rounded once; fp16 saturates instead of overflowing."""

import functools
import math
from collections.abc import Callable, Iterator

import torch

from collectives.kernels.loop import Float, FloatArray, Int, Loop, also_on_gpus, array

LENGTH = 2**16


def cache_blocks(numel: int, device: torch.device, multiple_of: int = 1) -> Iterator[slice]:
    """Yield slices that cover 0..numel in order: short enough for the cache on a CPU, a single one on a GPU.

    Args:
        numel: elements to cover.
        device: device of the elements.
        multiple_of: the length of every slice but the last is a multiple of this.
    """
    step = -(-LENGTH // multiple_of) * multiple_of if device.type == "cpu" else max(1, numel)
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
    """Round to the value type that is sent; values beyond its range become its largest value, NaN stays NaN.

    Args:
        x: floating, any shape.
        dtype: the value type.
        world_size: for fp16, values are clamped so that a sum over this many ranks cannot overflow in any order.
        out: optional result tensor of that type and the shape of `x`.

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
    """Clamp fp32 `x` to +-limit and round it to 16 bits into `out`; both contiguous and of one shape."""
    loop = _ROUND[out.dtype]
    if loop.serves(x):
        loop(x, x.numel(), limit, out)
    else:
        out.copy_(x.clamp(-limit, limit))


@functools.cache
def value_limit(dtype: torch.dtype, world_size: int) -> float:
    """Return the largest magnitude to send in this type.

    For fp16, a sum of `world_size` terms up to it cannot overflow: it is a multiple of the type's coarsest spacing, so
    every partial sum of equal terms is exact. Rounding is monotone, so smaller terms cannot sum to more. finfo.max /
    world_size alone is not enough: 65504 / 3 rounds up in fp16, and three times that value overflows. For other types
    it is their maximum.

    Raises:
        ValueError: `world_size` is beyond fp16's precision.
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
    """Return the sum in the wider of both types: 16-bit floats are rounded once, fp16 saturates, integers wrap.

    `keep_lost` gets 0, the rounding errors of 16-bit sums, and `positions`.
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
    """Return the rounding error of `total`, which has a type in `SHORT`: a + b in fp32, minus `total`."""
    return (a.float() + b.float()).sub_(total)


@also_on_gpus
def sum_values(a: torch.Tensor, b: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """Write the sum of 16-bit floats, clamped to +-limit, into `out`; all contiguous, of one type and shape."""
    loop = _SUM[out.dtype]
    if loop.serves(a, b):
        loop(a, b, a.numel(), limit, out)
    else:
        to_value_dtype(a.float() + b.float(), out.dtype, out=out)


def write_divided(values: torch.Tensor, divisor: float, out: torch.Tensor) -> None:
    """Write values / divisor into `out`; floating [n] and fp32 [n]."""
    if values.dtype in _KINDS and out.is_contiguous() and _WRITE.serves(values, out):
        _WRITE(values.contiguous(), _KINDS.index(values.dtype), values.numel(), divisor, out)
        return
    for part in cache_blocks(values.numel(), values.device):
        out[part].copy_(values[part]).div_(divisor)


def divided(values: torch.Tensor, divisor: float, dtype: torch.dtype) -> torch.Tensor:
    """Return values / divisor as `dtype`, computed in fp32 or wider; may share memory with `values`."""
    wide = values.to(torch.promote_types(dtype, torch.float32))
    return (wide if divisor == 1 else wide / divisor).to(dtype)


def add_divided_(dense: torch.Tensor, values: torch.Tensor, divisor: float) -> None:
    """Add values / divisor to `dense` (mutated), both 1-D and equally long, without a temporary of full length."""
    if values.is_floating_point() and dense.dtype == torch.float32 and abs(math.frexp(divisor)[0]) == 0.5:
        dense.add_(values, alpha=1 / divisor)  # a power of two: multiplying is exact, so it equals dividing
        return
    for part in cache_blocks(values.numel(), values.device):
        dense[part].add_(divided(values[part], divisor, dense.dtype))
