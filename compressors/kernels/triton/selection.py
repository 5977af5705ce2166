"""Triton kernels of `compressors/kernels/selection.py`, and functions that all kernels share.

The k-th largest magnitude of a group is found bit by bit in registers; that of a whole tensor, by histograms of digits.
Each program first counts the entries that it will write; a prefix sum of the counts gives their places in the output.
"""

import math

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from compressors.kernels.selection import INFINITE, STRETCH, level_bits

TILE = 2048
NARROWEST = 16  # smallest width of a piece of a row


def row_sums(x: torch.Tensor, row_numel: int, term: str, limit: float = 0.0) -> torch.Tensor:
    """Return the sum of the terms of every row: fp64 [ceil(numel / row_numel)].

    Args:
        x: fp32 [numel], or fp64 for "given".
        row_numel: elements per row.
        term: the term of an element x. "limited": min(|x|, limit); "square": the square of min(|x|, limit); "positive"
            or "negative": x if it has this sign, otherwise 0; "given": x.
        limit: exact in fp32; used for the terms "limited" and "square".
    """
    x, row_numel = x.contiguous(), min(row_numel, max(1, x.numel()))
    pieces, width = _pieces(row_numel)
    num_pieces, pieces_left = triton.cdiv(x.numel(), row_numel) * pieces, pieces
    while width > 1:  # three halvings per launch, or fewer if fewer are left
        parts = min(8, width)
        width //= parts
        sums = torch.empty(num_pieces * width, dtype=torch.float64, device=x.device)
        launch(
            _add_parts, triton.cdiv(len(sums), TILE), x, sums, x.numel(), row_numel, pieces_left, len(sums), limit,
            TERM=term, PARTS=parts, WIDTH=width, TILE=TILE,
        )  # fmt: skip
        x, row_numel, pieces_left, term = sums, width, 1, "given"
    return x if pieces == 1 else row_sums(x, pieces, "given")


def row_maxima(x: torch.Tensor, row_numel: int) -> torch.Tensor:
    """Return the bits of every row's largest magnitude; NaN is above infinity: int32 [ceil(numel / row_numel)]."""
    x, row_numel = x.contiguous(), min(row_numel, max(1, x.numel()))
    pieces, width = _pieces(row_numel)
    num_rows = triton.cdiv(x.numel(), row_numel)
    maxima = torch.empty(num_rows * pieces, dtype=torch.int32, device=x.device)
    rows = TILE // width
    launch(
        _max_pieces, triton.cdiv(len(maxima), rows), x, maxima, x.numel(), row_numel, pieces, len(maxima),
        WIDTH=width, ROWS=rows,
    )  # fmt: skip
    return maxima.view(num_rows, pieces).amax(1) if pieces > 1 else maxima


def _pieces(row_numel: int) -> tuple[int, int]:
    # the number of pieces per row and their width, a power of two; padding with zeros changes no sum
    width = min(STRETCH, max(NARROWEST, triton.next_power_of_2(row_numel)))
    return triton.cdiv(row_numel, width), width


@triton.jit
def _offsets(numel, row_numel, pieces, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    # this program's piece numbers [ROWS], the places of their elements [ROWS, WIDTH], and a mask of valid places
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = piece // pieces
    start = row * row_numel + (piece % pieces) * WIDTH
    stop = tl.minimum((row + 1) * row_numel, numel)
    places = start[:, None] + tl.arange(0, WIDTH)[None, :]
    return piece, places, places < stop[:, None]


@triton.jit(do_not_specialize=["limit"])
def _add_parts(
    x, out, numel, row_numel, pieces, count, limit,
    TERM: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # adds the PARTS parts of every piece, each of WIDTH terms, in the order in which halving adds them: fp64 [count]
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    piece = place // WIDTH
    row = piece // pieces
    first = row * row_numel + (piece % pieces) * (PARTS * WIDTH) + place % WIDTH
    stop = tl.where(place < count, tl.minimum((row + 1) * row_numel, numel), 0)
    if PARTS == 8:
        total = _four(x, first, stop, limit, TERM, WIDTH, 2) + _four(x, first + WIDTH, stop, limit, TERM, WIDTH, 2)
    elif PARTS == 4:
        total = _four(x, first, stop, limit, TERM, WIDTH, 1)
    else:
        total = _two(x, first, stop, limit, TERM, WIDTH)
    tl.store(out + place, total, mask=place < count)


@triton.jit
def _four(x, first, stop, limit, TERM: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr):
    lower = _two(x, first, stop, limit, TERM, 2 * STEP * WIDTH)
    return lower + _two(x, first + STEP * WIDTH, stop, limit, TERM, 2 * STEP * WIDTH)


@triton.jit
def _two(x, first, stop, limit, TERM: tl.constexpr, DISTANCE: tl.constexpr):
    lower = _terms(tl.load(x + first, mask=first < stop, other=0.0), limit, TERM)
    second = first + DISTANCE
    return lower + _terms(tl.load(x + second, mask=second < stop, other=0.0), limit, TERM)


@triton.jit
def _terms(x, limit, TERM: tl.constexpr):
    # the terms of elements x, in fp64; see `row_sums`
    if TERM == "given":
        return x
    if TERM == "positive":
        return tl.where(x >= 0, x, 0.0).to(tl.float64)
    if TERM == "negative":
        return tl.where(x >= 0, 0.0, x).to(tl.float64)
    bound = tl.zeros_like(x) + tl.cast(limit, tl.float32)
    limited = tl.where(tl.abs(x) > bound, bound, tl.abs(x)).to(tl.float64)
    return limited * limited if TERM == "square" else limited


@triton.jit
def _max_pieces(x, out, numel, row_numel, pieces, num_pieces, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    piece, places, inside = _offsets(numel, row_numel, pieces, WIDTH, ROWS)
    largest = tl.max(magnitude_bits(tl.load(x + places, mask=inside, other=0.0)), 1)
    tl.store(out + piece, largest, mask=piece < num_pieces)


@triton.jit
def pack_tile(codes, BITS: tl.constexpr, HIGH_FIRST: tl.constexpr, TILE: tl.constexpr):
    """Pack the low BITS of integer codes [TILE] into bytes: uint8 [TILE * BITS / 8]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    order = tl.arange(0, PER_BYTE)
    if HIGH_FIRST:
        order = PER_BYTE - 1 - order
    codes = codes.to(tl.int32) & ((1 << BITS) - 1)
    return tl.sum(tl.reshape(codes, (TILE // PER_BYTE, PER_BYTE)) << (order * BITS)[None, :], 1).to(tl.uint8)


@triton.jit
def store_bytes(out, packed, numel, BITS: tl.constexpr, TILE: tl.constexpr):
    """Store this program's packed bytes of `numel` codes."""
    NBYTES: tl.constexpr = TILE * BITS // 8
    places = tl.program_id(0).to(tl.int64) * NBYTES + tl.arange(0, NBYTES)
    tl.store(out + places, packed, mask=places < (tl.cast(numel, tl.int64) * BITS + 7) // 8)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| in fp32 as integers; larger magnitudes give larger integers, and NaN is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def relative_tile(x, divisors, numel, block_numel, first, TILE: tl.constexpr):
    """Return TILE elements of `x` from element `first` on, each divided by its block's divisor; 0 beyond the end."""
    places = first + tl.arange(0, TILE)
    inside = places < numel
    block = first // block_numel + (tl.cast(first % block_numel, tl.int32) + tl.arange(0, TILE)) // block_numel
    divisor = tl.load(divisors + block, mask=inside, other=1.0)
    return tl.div_rn(tl.load(x + places, mask=inside, other=0.0), divisor)


@triton.jit
def finite_magnitude_bits(x):
    """Return the bits of |x| in fp32 as integers; larger magnitudes give larger integers, NaN counts as infinity."""
    return tl.minimum(magnitude_bits(x), 0x7F800000)


def largest_magnitude(x: torch.Tensor) -> float:
    return float(row_maxima(x, x.numel()).clamp_(max=INFINITE).view(torch.float32)) if x.numel() else 0.0


def sum_of_squares(x: torch.Tensor, limit: float = math.inf) -> float:
    return _sum(x, "square", limit)


def sum_of_magnitudes(x: torch.Tensor, limit: float = math.inf) -> float:
    return _sum(x, "limited", limit)


def _sum(x: torch.Tensor, term: str, limit: float) -> float:
    return float(row_sums(x, x.numel(), term, limit)) if x.numel() else 0.0


DIGITS = ((20, 11), (9, 11), (0, 9))  # shift and width of each digit of a magnitude's 31 bits
RADIX_TILE = 4096
TILES = 8  # tiles that a program counts before it adds its counts to the common histogram


@triton.jit
def _count_digits(
    x, upper, counts, numel, SHIFT: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Count how often each value of the next digit occurs in the magnitudes of `x` whose upper bits equal `upper`.

    The numbers are added to `counts`.
    """
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
    """Find the next digit of the `rank`-th largest magnitude from the counts of digits, and append it to `upper`.

    `rank` is replaced with the rank among the magnitudes that begin with these upper bits.
    """
    NUM_VALUES: tl.constexpr = 1 << WIDTH
    found = tl.load(counts + NUM_VALUES - 1 - tl.arange(0, NUM_VALUES))
    wanted = tl.load(rank)
    is_above = tl.cumsum(found, 0) < wanted
    tl.store(upper, (tl.load(upper) << WIDTH) | (NUM_VALUES - 1 - tl.sum(is_above.to(tl.int32), 0)))
    tl.store(rank, wanted - tl.sum(tl.where(is_above, found, 0), 0))


def select_short_groups(x: torch.Tensor, group_size: int, k: int, k_last: int) -> torch.Tensor:
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
    selected = x.new_empty(k, dtype=torch.int64)
    if not k:
        return selected
    # find the bits of the k-th largest magnitude, digit by digit, and the number of entries equal to it to select
    upper = torch.zeros(1, dtype=torch.int32, device=x.device)
    rank = torch.full((1,), k, dtype=torch.int32, device=x.device)
    for shift, width in DIGITS:
        counts = torch.zeros(1 << width, dtype=torch.int32, device=x.device)
        launch(
            _count_digits, triton.cdiv(x.numel(), RADIX_TILE * TILES), x, upper, counts, x.numel(),
            SHIFT=shift, WIDTH=width, TILE=RADIX_TILE, TILES=TILES,
        )  # fmt: skip
        launch(_descend, 1, counts, upper, rank, WIDTH=width)
    _write(x, upper, rank, _counts(x, upper), selected)
    return selected


def reaching(x: torch.Tensor, level: float) -> torch.Tensor:
    bound = _below(x, level)
    counts = _counts(x, bound)
    selected = x.new_empty(int(counts[0].sum()), dtype=torch.int64)
    _write(x, bound, torch.zeros_like(bound), counts, selected)
    return selected


def _below(x: torch.Tensor, level: float) -> torch.Tensor:
    # the bits of the largest magnitude below the level, int32 [1]
    return torch.full((1,), level_bits(level) - 1, dtype=torch.int32, device=x.device)


def _counts(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    # the numbers of each program's magnitudes above the bound, and equal to the bound: int64 [2, num_programs]
    num_programs = triton.cdiv(x.numel(), TILE)
    counts = torch.empty(2, num_programs, dtype=torch.int64, device=x.device)
    launch(_count, num_programs, x, bound, counts, x.numel(), num_programs, TILE=TILE)
    return counts


def _write(
    x: torch.Tensor, bound: torch.Tensor, num_tied: torch.Tensor, counts: torch.Tensor, selected: torch.Tensor
) -> None:
    """Write to `selected` the positions of all |x| above `bound`, and of the first `num_tied` that equal `bound`.

    `counts` is the result of `_counts`.
    """
    launch(
        _write_selected, counts.shape[1], x, bound, num_tied, counts.cumsum(1) - counts, selected, x.numel(),
        counts.shape[1], TILE=TILE,
    )  # fmt: skip


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
