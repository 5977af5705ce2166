"""Shared parts of the Triton kernels: sums and maxima of rows, quotients by block, packing of codes into bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from compressors.kernels.selection import STRETCH

TILE = 2 * STRETCH
NARROWEST = 16  # smallest width of a piece of a row


def row_sums(x: torch.Tensor, row_numel: int, term: str, parameter: float = 0.0) -> torch.Tensor:
    """Return the sum of the terms of every row: fp64 [ceil(numel / row_numel)].

    Args:
        x: fp32 [numel], or fp64 for "given".
        row_numel: elements per row.
        term: the term of an element x: "reaching", |x| if it is at least the parameter; "limited", min(|x|, parameter);
            "square", the square of that; "positive" or "negative", x if it has this sign; "given", x.
        parameter: the level or limit, exact in fp32.
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
    """Return the bits of every row's largest magnitude, NaN above infinity: int32 [ceil(numel / row_numel)]."""
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
    """Return the number of pieces per row and their width, a power of two; padding with zeros changes no sum."""
    width = min(STRETCH, max(NARROWEST, triton.next_power_of_2(row_numel)))
    return triton.cdiv(row_numel, width), width


@triton.jit
def _offsets(numel, row_numel, pieces, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """Return this program's piece numbers [ROWS], their elements' places and a mask of valid ones [ROWS, WIDTH]."""
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
    """Return the terms of elements, in fp64; see `row_sums`."""
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
    """Return the bits of |x| in fp32 as integers, which have the order of the magnitudes, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def relative_tile(x, divisors, numel, block_numel, first, TILE: tl.constexpr):
    """Return elements divided by their block's divisor, 0 beyond the end: fp32 [TILE]."""
    places = first + tl.arange(0, TILE)
    inside = places < numel
    block = first // block_numel + (tl.cast(first % block_numel, tl.int32) + tl.arange(0, TILE)) // block_numel
    divisor = tl.load(divisors + block, mask=inside, other=1.0)
    return tl.div_rn(tl.load(x + places, mask=inside, other=0.0), divisor)


@triton.jit
def finite_magnitude_bits(x):
    """Return `magnitude_bits` with NaN as infinity."""
    return tl.minimum(magnitude_bits(x), 0x7F800000)
