"""Elements as integer multiples of their block's scale."""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import Parts, launch
from collectives.payloads.codec.triton.philox import shared_tile
from compressors.kernels.blocks import divisors
from compressors.kernels.triton.tiles import pack_tile, relative_tile, store_bytes

TILE = 2048


def pack_levels(
    x: Parts,
    scales: torch.Tensor,
    block_numel: int,
    *,
    bits: int,
    multiplier: int = 1,
    key: int | None = None,
    out: torch.Tensor,
) -> None:
    """Rounded to the nearest, or at random by the numbers of a key."""
    launch(
        _pack_levels, triton.cdiv(x.numel, TILE),
        x.flat, divisors(scales), out, x.numel, block_numel, float(multiplier), key or 0,
        AT_RANDOM=key is not None, BITS=bits, TILE=TILE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["key"])
def _pack_levels(
    x, divisors, out, numel, block_numel, multiplier, key,
    AT_RANDOM: tl.constexpr, BITS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    PARTS: tl.constexpr = 8388608 if AT_RANDOM else 1
    MOST: tl.constexpr = PARTS * ((1 << (BITS - 1)) - 1)
    levels = relative_tile(x, divisors, numel, block_numel, first, TILE) * (PARTS * multiplier)
    levels = tl.where(levels == levels, levels, 0.0)
    levels = tl.where(levels > MOST, MOST * 1.0, levels)
    levels = tl.where(levels < -MOST, MOST * -1.0, levels)
    whole = tl.where(levels < 0, -8388608.0, 8388608.0)  # 2^23: added, it leaves no room for a fraction
    rounded = tl.where(tl.abs(levels) < 8388608.0, levels + whole - whole, levels).to(tl.int32)
    if AT_RANDOM:
        rounded = (rounded + (shared_tile(key, first, TILE) >> 9).to(tl.int32)) >> 23
    store_bytes(out, pack_tile(rounded, BITS, False, TILE), numel, BITS, TILE)
