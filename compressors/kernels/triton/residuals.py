"""Triton kernel of `compressors/kernels/residuals.py`."""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch

TILE = 4096


def add(a: torch.Tensor, b: torch.Tensor, *, factor: float = 1.0, out: torch.Tensor) -> None:
    """Write a + factor * b to `out`, where the product is rounded before the addition."""
    launch(
        _add_scaled, triton.cdiv(out.numel(), TILE), a.contiguous(), b.contiguous(), out, out.numel(), factor, TILE=TILE
    )


@triton.jit
def _add_scaled(a, b, out, numel, factor, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    product = tl.load(b + places, mask=inside) * tl.cast(factor, tl.float32)
    tl.store(out + places, tl.load(a + places, mask=inside).to(tl.float32) + product, mask=inside)
