"""Elements as signed powers of two relative to their block's scale."""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import Parts, launch
from collectives.payloads.codec.triton.philox import shared_tile
from compressors.kernels.blocks import divisors
from compressors.kernels.triton.tiles import magnitude_bits, pack_tile, relative_tile, store_bytes

TILE = 2048


def pack_powers(x: Parts, scales: torch.Tensor, block_numel: int, *, bits: int, key: int, out: torch.Tensor) -> None:
    """Rounded at random by the numbers of a key."""
    launch(
        _pack_powers, triton.cdiv(x.numel, TILE),
        x.flat, divisors(scales), out, x.numel, block_numel, key, BITS=bits, TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key"])
def _pack_powers(x, divisors, out, numel, block_numel, key, BITS: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    NUM_EXPONENTS: tl.constexpr = (1 << (BITS - 1)) - 1
    SMALLEST: tl.constexpr = 2.0 ** (1 - NUM_EXPONENTS)
    relative = relative_tile(x, divisors, numel, block_numel, first, TILE)
    magnitude = tl.where(relative == relative, tl.abs(relative), 0.0)
    magnitude = tl.where(magnitude > 1, 1.0, magnitude)
    is_below = magnitude < SMALLEST
    mantissa = magnitude_bits(tl.where(is_below, magnitude + SMALLEST, magnitude))
    chance = (shared_tile(key, first, TILE) >> 9).to(tl.int32)
    exponent = ((mantissa + chance) >> 23) - is_below.to(tl.int32)
    code = (128 - exponent) & NUM_EXPONENTS
    is_negative = (relative.to(tl.int32, bitcast=True) < 0) & (code > 0)
    code += tl.where(is_negative, NUM_EXPONENTS + 1, 0)
    store_bytes(out, pack_tile(code, BITS, False, TILE), numel, BITS, TILE)
