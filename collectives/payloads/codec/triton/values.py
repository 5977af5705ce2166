"""Triton kernels that round to 16-bit floats and sum them.

Only Triton's interpreter has run these kernels, no GPU.
"""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch

TILE = 4096


def round_values(x: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """Clamp fp32 `x` to +-limit and round it to 16 bits into `out`."""
    launch(
        _round, triton.cdiv(x.numel(), TILE), x, out.view(torch.int16), x.numel(), limit,
        IS_FP16=out.dtype == torch.float16, TILE=TILE,
    )  # fmt: skip


def sum_values(a: torch.Tensor, b: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """Add 16-bit floats in fp32, clamp to +-limit and round once into `out`."""
    launch(
        _sum, triton.cdiv(a.numel(), TILE), a.view(torch.int16), b.view(torch.int16), out.view(torch.int16),
        a.numel(), limit, IS_FP16=out.dtype == torch.float16, TILE=TILE,
    )  # fmt: skip


@triton.jit
def _round(x, out, numel, limit, IS_FP16: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    tl.store(out + places, _to_half(tl.load(x + places, mask=inside), limit, IS_FP16), mask=inside)


@triton.jit
def _sum(a, b, out, numel, limit, IS_FP16: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    total = _from_half(tl.load(a + places, mask=inside), IS_FP16) + _from_half(
        tl.load(b + places, mask=inside), IS_FP16
    )
    tl.store(out + places, _to_half(total, limit, IS_FP16), mask=inside)


@triton.jit
def _to_half(x, limit, IS_FP16: tl.constexpr):
    """Clamp fp32 to +-limit, round to nearest (ties to even), return the bits as int16; NaN stays NaN."""
    most = tl.zeros_like(x) + limit
    x = tl.where(x > most, most, x)
    x = tl.where(x < -most, -most, x)
    if IS_FP16:
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0).to(tl.int16)


@triton.jit
def _from_half(half, IS_FP16: tl.constexpr):
    """Return the exact fp32 values of 16-bit floats given as int16."""
    if IS_FP16:
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)
