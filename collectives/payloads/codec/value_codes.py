"""Codes of 2 or 8 bits for the values of sparse payloads, and the tables of numbers that decoding the codes needs.

Values are in the order of their positions. Blocks of consecutive values share numbers:
    two_magnitudes: a block shares a smaller and a larger magnitude in bf16; a value has a sign bit (bit 0) and a bit
        that selects the magnitude (bit 1; 1 for the larger).
    sigma: all values share four numbers in fp32; a value has the index of one of them.
    int8: a block shares a step in fp32; a value has a whole number of steps, -127..127.
"""

from typing import Literal

import torch

from collectives.kernels.loop import ByteArray, FloatArray, Int, Loop, array
from collectives.payloads.codec.bits import packed_nbytes, unpack_bits

ValueCoding = Literal["two_magnitudes", "sigma", "int8"]
VALUE_CODINGS: tuple[ValueCoding, ...] = ("two_magnitudes", "sigma", "int8")

SHARED_OVER = 4096  # a block has the values of this many elements of the dense tensor, on average
SHORTEST_BLOCK = 32  # values per block; the two magnitudes then take one bit per value
SIGMA_LEVELS = 4
MOST_STEPS = 127
NUM_SHARED: dict[ValueCoding, int] = {"two_magnitudes": 2, "sigma": SIGMA_LEVELS, "int8": 1}  # numbers per block

_TAKE_MAGNITUDES = Loop("take_magnitudes", ByteArray, Int, Int, array(torch.bfloat16), FloatArray)
_TAKE_TABLE_VALUES = Loop("take_table_values", ByteArray, Int, FloatArray, FloatArray)


def bits_of_code(coding: ValueCoding) -> int:
    """Return the bits per value in this coding: 2 or 8."""
    return 8 if coding == "int8" else 2


def table_dtype(coding: ValueCoding) -> torch.dtype:
    """Return the dtype of the numbers that blocks of values share in this coding."""
    return torch.bfloat16 if coding == "two_magnitudes" else torch.float32


def block_length(coding: ValueCoding, count: int, numel: int) -> int:
    """Return how many values are in a block that shares numbers, if `count` of `numel` elements are sent.

    A block has as many values as are sent of 4096 elements, in multiples of 8 (40 if 1 % are sent), but at least 32.
    With "sigma", all values are one block.
    """
    if coding == "sigma":
        return max(1, count)
    return max(SHORTEST_BLOCK, (count * SHARED_OVER + numel // 2) // max(1, numel) // 8 * 8)


def table_length(coding: ValueCoding, count: int, numel: int) -> int:
    """Return the number of shared numbers in all blocks, if `count` of `numel` elements are sent."""
    return -(-count // block_length(coding, count, numel)) * NUM_SHARED[coding]


def coded_nbytes(coding: ValueCoding, count: int, numel: int) -> int:
    """Return the bytes of the shared numbers and codes, if `count` of `numel` elements are sent."""
    tables = table_length(coding, count, numel) * table_dtype(coding).itemsize
    return tables + packed_nbytes(count, bits_of_code(coding))


def table_values(coding: ValueCoding, tables: torch.Tensor) -> torch.Tensor:
    """Return the value of each 2-bit code in each block, fp32 [num_blocks, 4], without -0.0."""
    if coding == "sigma":
        return tables.view(-1, SIGMA_LEVELS)
    magnitudes = tables.float().view(-1, 2, 1)
    return torch.cat([magnitudes, 0 - magnitudes], 2).view(-1, 4)


def decode_values(
    coding: ValueCoding, tables: torch.Tensor, packed: torch.Tensor, count: int, block: int
) -> torch.Tensor:
    """Return the values that `packed` codes stand for, fp32 [count].

    Args:
        coding: how the values are coded.
        tables: the shared numbers, [table_length(coding, count, numel)] in `table_dtype(coding)`.
        packed: the codes, uint8 [ceil(count * bits / 8)], low bits first.
        count: number of values.
        block: the result of `block_length`.
    """
    if coding == "int8":
        return packed.view(torch.int8) * tables.unsqueeze(1).expand(-1, block).reshape(-1)[:count]
    if _TAKE_MAGNITUDES.serves(packed):
        packed, tables, values = packed.contiguous(), tables.contiguous(), torch.empty(count, dtype=torch.float32)
        if coding == "two_magnitudes":
            _TAKE_MAGNITUDES(packed, count, block, tables, values)
        else:
            _TAKE_TABLE_VALUES(packed, count, tables, values)
        return values
    blocks = torch.arange(count, device=packed.device) // block
    return table_values(coding, tables).view(-1)[4 * blocks + unpack_bits(packed, count, 2)]
