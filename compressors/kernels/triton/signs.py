"""One bit per element, and the sums that say what a bit stands for."""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from compressors.kernels.triton.magnitudes import sum_of_magnitudes
from compressors.kernels.triton.rows import row_sums
from compressors.kernels.triton.tiles import pack_tile, store_bytes

TILE = 4096


def signs_and_magnitude(x: torch.Tensor, out: torch.Tensor) -> float:
    """The sum of magnitudes."""
    _pack(x, out)
    return sum_of_magnitudes(x)


def signs_and_sums(x: torch.Tensor, out: torch.Tensor) -> tuple[int, float, float]:
    """How many bits are set, and the sums of those elements and of the others."""
    num_set = _pack(x, out).sum()
    if not x.numel():
        return 0, 0.0, 0.0
    above, below = (float(row_sums(x, x.numel(), term)) for term in ("positive", "negative"))
    return int(num_set), above, below


def _pack(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the bits; how many each program sets, int32 [num_programs]."""
    num_programs = triton.cdiv(x.numel(), TILE)
    counts = torch.empty(num_programs, dtype=torch.int32, device=x.device)
    launch(_pack_signs, num_programs, x.contiguous(), out, counts, x.numel(), TILE=TILE)
    return counts


@triton.jit
def _pack_signs(x, out, counts, numel, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_set = (tl.load(x + places, mask=places < numel, other=-1.0) >= 0).to(tl.int32)
    store_bytes(out, pack_tile(is_set, 1, False, TILE), numel, 1, TILE)
    tl.store(counts + tl.program_id(0), tl.sum(is_set, 0))
