"""Arithmetic per block of consecutive elements; the last block may be shorter."""

from __future__ import annotations

import torch

from collectives.kernels.loop import DoubleArray, Int, IntArray, Longs, Loop, Parts, also_on_gpus
from compressors.kernels.magnitudes import folded_sum

_MAXIMA = Loop("block_maxima", Longs, Longs, Int, Int, IntArray)
_SQUARES = Loop("block_squares", Longs, Longs, Int, Int, DoubleArray)


@also_on_gpus
def block_maxima(x: Parts, block_numel: int) -> torch.Tensor:
    """Largest magnitude of every block, NaN above all: fp32 [ceil(numel / block_numel)]."""
    if _MAXIMA.serves(*x.tensors):
        maxima = torch.empty(-(-x.numel // block_numel), dtype=torch.int32)
        _MAXIMA(x.starts, x.borders, x.numel, block_numel, maxima)
    else:
        maxima = _per_block(x.flat.view(torch.int32) & 0x7FFFFFFF, block_numel).amax(1)
    return maxima.view(torch.float32)


@also_on_gpus
def block_squares(x: Parts, block_numel: int) -> torch.Tensor:
    """The sum of every block's squares: fp64 [ceil(numel / block_numel)]; they neither overflow nor vanish."""
    if _SQUARES.serves(*x.tensors):
        squares = torch.empty(-(-x.numel // block_numel), dtype=torch.float64)
        _SQUARES(x.starts, x.borders, x.numel, block_numel, squares)
        return squares
    return folded_sum(_per_block(x.flat.double().square(), block_numel))


def block_norms(x: Parts, block_numel: int) -> torch.Tensor:
    """L2 norm of every block: fp32 [ceil(numel / block_numel)]."""
    return block_squares(x, block_numel).sqrt_().clamp_(max=torch.finfo(torch.float32).max).float()


def relative_to_blocks(x: torch.Tensor, scales: torch.Tensor, block_numel: int) -> torch.Tensor:
    """Every element over its block's scale, freshly made: fp32 [numel]."""
    return x / scales.repeat_interleave(min(block_numel, x.numel()))[: x.numel()]


def divisors(scales: torch.Tensor) -> torch.Tensor:
    """The scales, fp32 [num_blocks], with 1 where they are 0 or NaN, for nothing is divided by those."""
    return torch.where(scales > 0, scales, 1)


def _per_block(x: torch.Tensor, block_numel: int) -> torch.Tensor:
    """A block per row, the last one filled up with zeros: [num_blocks, min(block_numel, numel)]."""
    width = max(1, min(block_numel, x.numel()))
    return torch.nn.functional.pad(x, (0, -x.numel() % width)).view(-1, width)
