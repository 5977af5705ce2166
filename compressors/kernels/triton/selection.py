"""Triton kernels of `compressors/kernels/selection.py`.

The k-th largest magnitude of a group is found bit by bit in registers, that of a whole tensor by histograms of digits.
Programs first count the entries that they will write; a prefix sum of the counts gives their places in the output.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from compressors.kernels.selection import magnitude_bits
from compressors.kernels.triton.tiles import finite_magnitude_bits, row_maxima, row_sums

INFINITE = 0x7F800000  # the bits of infinity in fp32


def largest_magnitude(x: torch.Tensor) -> float:
    """Return the largest |x|, 0 if there are no entries; NaN counts as infinite."""
    return float(row_maxima(x, x.numel()).clamp_(max=INFINITE).view(torch.float32)) if x.numel() else 0.0


def sum_of_squares(x: torch.Tensor, limit: float = math.inf) -> float:
    """Return the sum of min(|x|, limit)^2."""
    return _sum(x, "square", limit)


def sum_of_limited(x: torch.Tensor, limit: float) -> float:
    """Return the sum of min(|x|, limit)."""
    return _sum(x, "limited", limit)


def sum_of_magnitudes(x: torch.Tensor, level: float = 0.0) -> float:
    """Return the sum of all |x| >= level."""
    reached = torch.tensor(magnitude_bits(level), dtype=torch.int32).view(torch.float32)
    return _sum(x, "reaching", float(reached))


def magnitudes_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """Return the sum and the maximum of the magnitudes, by two kernels."""
    return sum_of_magnitudes(x), largest_magnitude(x)


def squares_and_largest(x: torch.Tensor) -> tuple[float, float]:
    """Return the sum of the squares and the largest magnitude, by two kernels."""
    return sum_of_squares(x), largest_magnitude(x)


def _sum(x: torch.Tensor, term: str, parameter: float) -> float:
    return float(row_sums(x, x.numel(), term, parameter)) if x.numel() else 0.0


DIGITS = ((20, 11), (9, 11), (0, 9))  # shift and width of each digit of the 31 bits
RADIX_TILE = 4096
TILES = 8  # tiles that a program counts before it adds its counts to the common histogram


def kth_largest_bits(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the k-th largest |x|, where NaN counts as infinite.

    Args:
        x: fp32 [numel], contiguous.
        k: 1 <= k <= numel.

    Returns:
        Its bits, and how many of the entries equal to it are among the k largest: int32 [1] each.
    """
    upper = torch.zeros(1, dtype=torch.int32, device=x.device)
    rank = torch.full((1,), k, dtype=torch.int32, device=x.device)
    for shift, width in DIGITS:
        counts = torch.zeros(1 << width, dtype=torch.int32, device=x.device)
        launch(
            _count_digits, triton.cdiv(x.numel(), RADIX_TILE * TILES), x, upper, counts, x.numel(),
            SHIFT=shift, WIDTH=width, TILE=RADIX_TILE, TILES=TILES,
        )  # fmt: skip
        launch(_descend, 1, counts, upper, rank, WIDTH=width)
    return upper, rank


@triton.jit
def _count_digits(
    x, upper, counts, numel, SHIFT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Among the magnitudes with these upper bits, count those with each value of the next digit."""
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
    """Append the digit of the entry of this rank to `upper`; reduce `rank` to that among entries with these bits."""
    NUM_VALUES: tl.constexpr = 1 << WIDTH
    found = tl.load(counts + NUM_VALUES - 1 - tl.arange(0, NUM_VALUES))
    wanted = tl.load(rank)
    is_above = tl.cumsum(found, 0) < wanted
    tl.store(upper, (tl.load(upper) << WIDTH) | (NUM_VALUES - 1 - tl.sum(is_above.to(tl.int32), 0)))
    tl.store(rank, wanted - tl.sum(tl.where(is_above, found, 0), 0))


LONGEST_GROUP = 16384
TILE = 2048


def select_short_groups(x: torch.Tensor, group_size: int, k: int, k_last: int) -> torch.Tensor:
    """Return the positions of the largest |x| of every group of up to 16384 entries."""
    num_whole, rest = divmod(x.numel(), group_size)
    num_groups = num_whole + (rest > 0)
    selected = x.new_empty(num_whole * k + (k_last if rest else 0), dtype=torch.int64)
    width = triton.next_power_of_2(group_size)
    rows = max(1, TILE // width)
    launch(
        _select_groups, triton.cdiv(num_groups, rows), x, selected, x.numel(), group_size, k, k_last, num_whole,
        WIDTH=width, ROWS=rows, num_warps=4 if width <= TILE else 8,
    )  # fmt: skip
    return selected


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Return the positions of the k largest |x|."""
    selected = x.new_empty(k, dtype=torch.int64)
    if k:
        bound, num_tied = kth_largest_bits(x, k)
        _write(x, bound, num_tied, _counts(x, bound), selected)
    return selected


def count_reaching(x: torch.Tensor, level: float) -> int:
    """Return the number of |x| >= level."""
    return int(_counts(x, _below(x, level))[0].sum())


def reaching(x: torch.Tensor, level: float) -> torch.Tensor:
    """Return the positions of all |x| >= level."""
    bound = _below(x, level)
    counts = _counts(x, bound)
    selected = x.new_empty(int(counts[0].sum()), dtype=torch.int64)
    _write(x, bound, torch.zeros_like(bound), counts, selected)
    return selected


def _below(x: torch.Tensor, level: float) -> torch.Tensor:
    """Return the bits of the largest magnitude below the level, int32 [1]."""
    return torch.full((1,), magnitude_bits(level) - 1, dtype=torch.int32, device=x.device)


def _counts(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """Count each program's magnitudes above the bound, and those equal to it: int64 [2, num_programs]."""
    num_programs = triton.cdiv(x.numel(), TILE)
    counts = torch.empty(2, num_programs, dtype=torch.int64, device=x.device)
    launch(_count, num_programs, x, bound, counts, x.numel(), num_programs, TILE=TILE)
    return counts


def _write(
    x: torch.Tensor, bound: torch.Tensor, num_tied: torch.Tensor, counts: torch.Tensor, selected: torch.Tensor
) -> None:
    """Write the positions of all magnitudes above the bound, and of the first `num_tied` that equal it."""
    starts = counts.cumsum(1) - counts
    launch(
        _write_selected, counts.shape[1], x, bound, num_tied, starts, selected, x.numel(), counts.shape[1], TILE=TILE
    )


@triton.jit
def _select_groups(x, selected, numel, group_size, k, k_last, num_whole, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    places = (group * group_size)[:, None] + column[None, :]
    inside = (column < group_size)[None, :] & (places < numel)
    sizes = tl.where(inside, finite_magnitude_bits(tl.load(x + places, mask=inside, other=0.0)), -1)
    kept = tl.where(group < num_whole, k, k_last)
    bound = tl.zeros((ROWS,), tl.int32)
    for i in range(31):
        higher = bound | (1 << (30 - i))
        reached = tl.sum((sizes >= higher[:, None]).to(tl.int32), 1)
        bound = tl.where(reached >= kept, higher, bound)
    above = (sizes > bound[:, None]).to(tl.int32)
    tied = (sizes == bound[:, None]).to(tl.int32)
    num_tied = kept - tl.sum(above, 1)
    keeps = above | (tied & (tl.cumsum(tied, 1) <= num_tied[:, None]).to(tl.int32))
    rank = (group * k)[:, None] + tl.cumsum(keeps, 1) - 1
    tl.store(selected + rank, places, mask=keeps > 0)


@triton.jit
def _above_and_tied(x, bound, numel, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    sizes = finite_magnitude_bits(tl.load(x + places, mask=inside, other=0.0))
    smallest = tl.load(bound)
    return places, ((sizes > smallest) & inside).to(tl.int32), ((sizes == smallest) & inside).to(tl.int32)


@triton.jit
def _count(x, bound, counts, numel, num_programs, TILE: tl.constexpr):
    _, above, tied = _above_and_tied(x, bound, numel, TILE)
    tl.store(counts + tl.program_id(0), tl.sum(above, 0).to(tl.int64))
    tl.store(counts + num_programs + tl.program_id(0), tl.sum(tied, 0).to(tl.int64))


@triton.jit
def _write_selected(x, bound, num_tied, starts, selected, numel, num_programs, TILE: tl.constexpr):
    places, above, tied = _above_and_tied(x, bound, numel, TILE)
    above_before = tl.load(starts + tl.program_id(0))
    tied_before = tl.load(starts + num_programs + tl.program_id(0))
    most = tl.load(num_tied).to(tl.int64)
    keeps = above | (tied & (tied_before + tl.cumsum(tied, 0) <= most).to(tl.int32))
    rank = above_before + tl.minimum(tied_before, most) + tl.cumsum(keeps, 0) - 1
    tl.store(selected + rank, places, mask=keeps > 0)
