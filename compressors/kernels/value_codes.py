"""Coding of the values that sparse payloads send, in 2 or 8 bits (`collectives/payloads/codec/value_codes.py`).

Values are converted to whole numbers of a unit, a fraction of the power of two above the largest magnitude. So sums are
exact, and every order of additions gives the same bits. NaN counts as positive infinity, and magnitudes above the
largest bf16 number count as that number.
"""

from typing import NamedTuple

import torch

from collectives.kernels.loop import ByteArray, FloatArray, Int, LongArray, Loop, array
from collectives.payloads.codec.bits import pack_bits, packed_nbytes
from collectives.payloads.codec.value_codes import (
    MOST_STEPS,
    NUM_SHARED,
    SIGMA_LEVELS,
    VALUE_CODINGS,
    ValueCoding,
    bits_of_code,
    table_dtype,
    table_values,
)
from collectives.payloads.codec.values import to_value_dtype
from compressors.kernels.selection import magnitudes

LARGEST = torch.finfo(torch.bfloat16).max
ROUNDS = 4  # rounds of Lloyd's method that start from the mean, which a first round from the median finds
PRECISION = 40  # bits of a magnitude as a whole number; sums are over blocks of at most 4096 magnitudes

_LOOPS = {
    coding: Loop(
        f"code_{coding}", FloatArray, Int, Int, array(table_dtype(coding)), ByteArray, FloatArray, LongArray, FloatArray
    )
    for coding in VALUE_CODINGS
}


class Coded(NamedTuple):
    """The result of `code_values`: the codes, and the values that they stand for.

    Attributes:
        tables: the numbers that blocks of values share, bf16 or fp32.
        packed: the codes, uint8 [ceil(count * bits / 8)], low bits first.
        arrived: the decoded values, fp32 [count].
    """

    tables: torch.Tensor
    packed: torch.Tensor
    arrived: torch.Tensor


def code_values(
    values: torch.Tensor, coding: ValueCoding, block: int, rest: tuple[torch.Tensor, torch.Tensor] | None = None
) -> Coded:
    """Code values in 2 or 8 bits each, and return the codes.

    Args:
        values: fp32 [count], contiguous.
        coding: how to code the values.
        block: the result of `block_length`, at most 4096 except for "sigma".
        rest: (positions of the values in a tensor, int64 [count]; that tensor, fp32, mutated). The decoded values are
            subtracted from the tensor. None if nothing is subtracted.
    """
    count = len(values)
    bits = min(30, (62 - count.bit_length()) // 2)  # the sum of the squares of all values fits into an int64
    if _LOOPS[coding].serves(values):
        num_blocks = -(-count // block)
        tables = torch.empty(num_blocks * NUM_SHARED[coding], dtype=table_dtype(coding))
        packed = torch.empty(packed_nbytes(count, bits_of_code(coding)), dtype=torch.uint8)
        arrived = torch.empty_like(values)
        positions, left = rest or (torch.empty(0, dtype=torch.int64), values[:0])
        _LOOPS[coding](values, count, bits if coding == "sigma" else block, tables, packed, arrived, positions, left)
        return Coded(tables, packed, arrived)
    match coding:
        case "two_magnitudes":
            coded = _two_magnitudes(values, block)
        case "sigma":
            coded = _sigma(values, bits)
        case "int8":
            coded = _int8(values, block)
    if rest:
        rest[1].scatter_add_(0, rest[0], coded.arrived.neg())
    return coded


def _two_magnitudes(values: torch.Tensor, block: int) -> Coded:
    count = len(values)
    sizes = magnitudes(values).clamp_(max=LARGEST)
    means = _two_means(_rows(sizes, block), count)
    middles = means.double().mean(1).repeat_interleave(block)[:count]
    codes = (values < 0) + 2 * (sizes > middles)
    blocks = torch.arange(count, device=values.device) // block
    table = table_values("two_magnitudes", means.view(-1))
    return Coded(means.view(-1), pack_bits(codes, 2), table.view(-1)[4 * blocks + codes])


def _two_means(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return the means of the small and of the large magnitudes of each row, bf16 [num_rows, 2], by Lloyd's method.

    Args:
        rows: fp32 [num_rows, block]; the last row is padded with zeros.
        count: number of magnitudes in all rows.
    """
    starts = torch.arange(len(rows), device=rows.device).unsqueeze(1) * rows.shape[1]
    lengths = (count - starts).clamp(max=rows.shape[1])
    scale, inverse = _scales(rows.amax(1, keepdim=True), PRECISION)
    wholes = (rows.double() * scale).round()
    low = high = wholes.sum(1, keepdim=True) / lengths
    for _ in range(ROUNDS):
        large = wholes > (low + high) / 2
        num_large = large.sum(1, keepdim=True)
        low = wholes.where(~large, 0).sum(1, keepdim=True) / (lengths - num_large)
        high = torch.where(num_large > 0, wholes.where(large, 0).sum(1, keepdim=True) / num_large, low)
    means = torch.cat([low, high], 1)
    return to_value_dtype((means * inverse).float(), torch.bfloat16)


def _sigma(values: torch.Tensor, bits: int) -> Coded:
    count = len(values)
    if not count:
        return Coded(values, values.to(torch.uint8), values)
    finite = _finite(values)
    scale, inverse = _scales(finite.abs().amax(), bits)
    wholes = (finite.double() * scale).round().long()
    mean = wholes.sum().double() / count
    variance = (wholes.square().sum().double() - wholes.sum().double() * mean) / (count - 1)
    width = 6 * variance.sqrt() / SIGMA_LEVELS
    width = torch.where((width > 0) & width.isfinite(), width, 1)
    levels = ((wholes - mean) / width + SIGMA_LEVELS // 2).round().clamp(0, SIGMA_LEVELS - 1).long()
    sums = torch.stack([wholes.where(levels == level, 0).sum() for level in range(SIGMA_LEVELS)]).double()
    counts = torch.stack([(levels == level).sum() for level in range(SIGMA_LEVELS)])
    table = torch.where(counts > 0, sums / counts * inverse, 0).float() + 0
    return Coded(table, pack_bits(levels, 2), table[levels])


def _int8(values: torch.Tensor, block: int) -> Coded:
    count = len(values)
    finite = _finite(values)
    steps = _rows(finite.abs(), block).amax(1) / MOST_STEPS
    each = steps.repeat_interleave(block)[:count]
    numbers = (finite / torch.where(each > 0, each, 1)).clamp(-MOST_STEPS, MOST_STEPS).round().to(torch.int8)
    return Coded(steps, numbers.view(torch.uint8), numbers * each)


def _finite(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num(nan=LARGEST).clamp_(-LARGEST, LARGEST)


def _rows(x: torch.Tensor, block: int) -> torch.Tensor:  # the last row is padded with zeros
    return torch.nn.functional.pad(x, (0, -len(x) % block)).view(-1, block)


def _scales(largest: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return 2^bits / (the power of two above `largest`), and its inverse; `largest` is fp32, the results are fp64."""
    exponents = (largest.double().view(torch.int64) >> 52).clamp(min=874)  # 874: that of the smallest fp32 number > 0
    scale, inverse = (2045 - exponents + bits) << 52, (exponents + 1 - bits) << 52
    return scale.view(torch.float64), inverse.view(torch.float64)
