"""Rows of consecutive elements, the last one shorter, each in pieces of up to 1024: sums of their terms, and maxima.

A sum is that of `folded_sum`: pieces are folded in half until one term is left, then their sums likewise.
"""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from compressors.kernels.magnitudes import STRETCH
from compressors.kernels.triton.tiles import magnitude_bits

TILE = 2 * STRETCH
NARROWEST = 16


def row_sums(x: torch.Tensor, row_numel: int, term: str, parameter: float = 0.0) -> torch.Tensor:
    """The sum of every row's terms: fp64 [ceil(numel / row_numel)].

    Args:
        x: fp32 [numel].
        row_numel: elements per row.
        term: of an element: "reaching" a level, "limited", "square" of limited, "positive", "negative".
        parameter: level or limit, of fp32 precision.
    """
    x, row_numel = x.contiguous(), min(row_numel, max(1, x.numel()))
    pieces, width = _pieces(row_numel)
    num_rows = triton.cdiv(x.numel(), row_numel)
    sums = torch.empty(num_rows * pieces, dtype=torch.float64, device=x.device)
    rows = TILE // width
    launch(
        _sum_pieces, triton.cdiv(len(sums), rows), x, sums, x.numel(), row_numel, pieces, len(sums), parameter,
        TERM=term, WIDTH=width, LEVELS=width.bit_length() - 1, ROWS=rows,
    )  # fmt: skip
    return sums if pieces == 1 else row_sums(sums, pieces, "given")


def row_maxima(x: torch.Tensor, row_numel: int) -> torch.Tensor:
    """The bits of the largest magnitude of every row, NaN above all: int32 [ceil(numel / row_numel)]."""
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
    """Pieces per row, and how long they are: a power of two, for zeros at the end change no sum."""
    width = min(STRETCH, max(NARROWEST, triton.next_power_of_2(row_numel)))
    return triton.cdiv(row_numel, width), width


@triton.jit
def _offsets(numel, row_numel, pieces, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """This program's pieces: their numbers [ROWS], places and which of these there are [ROWS, WIDTH]."""
    piece = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = piece // pieces
    start = row * row_numel + (piece % pieces) * WIDTH
    stop = tl.minimum((row + 1) * row_numel, numel)
    places = start[:, None] + tl.arange(0, WIDTH)[None, :]
    return piece, places, places < stop[:, None]


@triton.jit(do_not_specialize=["parameter"])
def _sum_pieces(
    x, out, numel, row_numel, pieces, num_pieces, parameter,
    TERM: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    piece, places, inside = _offsets(numel, row_numel, pieces, WIDTH, ROWS)
    terms = _terms(tl.load(x + places, mask=inside, other=0.0), parameter, TERM)
    for level in tl.static_range(LEVELS):
        halves = tl.reshape(terms, (ROWS, 2, WIDTH >> (level + 1)))
        lower, upper = tl.split(tl.permute(halves, (0, 2, 1)))
        terms = lower + upper
    tl.store(out + piece, tl.reshape(terms, (ROWS,)), mask=piece < num_pieces)


@triton.jit
def _terms(x, parameter, TERM: tl.constexpr):
    """What elements add to a sum, in fp64."""
    if TERM == "given":
        return x
    if TERM == "positive":
        return tl.where(x >= 0, x, 0.0).to(tl.float64)
    if TERM == "negative":
        return tl.where(x >= 0, 0.0, x).to(tl.float64)
    bound = tl.zeros_like(x) + tl.cast(parameter, tl.float32)
    if TERM == "reaching":
        reaches = magnitude_bits(x) >= magnitude_bits(bound)
        return tl.where(reaches, tl.abs(x), 0.0).to(tl.float64)
    limited = tl.where(tl.abs(x) > bound, bound, tl.abs(x)).to(tl.float64)
    return limited * limited if TERM == "square" else limited


@triton.jit
def _max_pieces(x, out, numel, row_numel, pieces, num_pieces, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    piece, places, inside = _offsets(numel, row_numel, pieces, WIDTH, ROWS)
    largest = tl.max(magnitude_bits(tl.load(x + places, mask=inside, other=0.0)), 1)
    tl.store(out + piece, largest, mask=piece < num_pieces)
