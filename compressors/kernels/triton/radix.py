"""The k-th largest magnitude, by histograms of three parts of its bits, the upper first; nothing waits for the CPU."""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from compressors.kernels.triton.tiles import finite_magnitude_bits

DIGITS = ((20, 11), (9, 11), (0, 9))
"""shift and width of the 31 bits' parts"""
TILE = 4096
TILES = 8
"""that a program counts before it adds to the histogram of all"""


def kth_largest_bits(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of the k-th largest |x|, NaN as infinity, and how many of those that equal it are among the k largest.

    Args:
        x: fp32 [numel], contiguous.
        k: 1 <= k <= numel.

    Returns:
        int32 [1] each.
    """
    upper = torch.zeros(1, dtype=torch.int32, device=x.device)
    rank = torch.full((1,), k, dtype=torch.int32, device=x.device)
    for shift, width in DIGITS:
        counts = torch.zeros(1 << width, dtype=torch.int32, device=x.device)
        launch(
            _count_digits, triton.cdiv(x.numel(), TILE * TILES), x, upper, counts, x.numel(),
            SHIFT=shift, WIDTH=width, TILE=TILE, TILES=TILES,
        )  # fmt: skip
        launch(_descend, 1, counts, upper, rank, WIDTH=width)
    return upper, rank


@triton.jit
def _count_digits(
    x, upper, counts, numel, SHIFT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """How many magnitudes with these upper bits have each value of the next ones."""
    NUM_VALUES: tl.constexpr = 1 << WIDTH
    wanted = tl.load(upper)
    found = tl.zeros((NUM_VALUES,), tl.int32)
    first = tl.program_id(0).to(tl.int64) * (TILE * TILES)
    for i in range(TILES):
        places = first + i * TILE + tl.arange(0, TILE)
        inside = places < numel
        sizes = finite_magnitude_bits(tl.load(x + places, mask=inside, other=0.0)) >> SHIFT
        found += tl.histogram(sizes & (NUM_VALUES - 1), NUM_VALUES, mask=inside & ((sizes >> WIDTH) == wanted))
    tl.atomic_add(counts + tl.arange(0, NUM_VALUES), found, mask=found > 0)


@triton.jit
def _descend(counts, upper, rank, WIDTH: tl.constexpr):
    """Append to `upper` the digit that the entry of this rank has; its rank among those with the same upper bits."""
    NUM_VALUES: tl.constexpr = 1 << WIDTH
    found = tl.load(counts + NUM_VALUES - 1 - tl.arange(0, NUM_VALUES))
    wanted = tl.load(rank)
    is_above = tl.cumsum(found, 0) < wanted
    tl.store(upper, (tl.load(upper) << WIDTH) | (NUM_VALUES - 1 - tl.sum(is_above.to(tl.int32), 0)))
    tl.store(rank, wanted - tl.sum(tl.where(is_above, found, 0), 0))
