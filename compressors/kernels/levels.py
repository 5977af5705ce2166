"""Elements as integer multiples of their block's scale."""

from __future__ import annotations

import torch

from collectives.kernels.loop import ByteArray, Float, FloatArray, Int, Longs, Loop, Parts, also_on_gpus
from collectives.payloads.codec.bits import pack_bits
from collectives.payloads.codec.philox import shared_words
from compressors.kernels.blocks import divisors, relative_to_blocks

PART_BITS = 23
PARTS = 1 << PART_BITS
"""of a level: as fine as fp32 is below one, and 127 levels of them an int32"""

_PACK = Loop("pack_levels", Longs, Longs, Int, FloatArray, Int, Float, Float, Int, Int, Int, ByteArray)


@also_on_gpus
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
    """Write the levels x / scale * multiplier, rounded to the nearest, or at random by the numbers of a key.

    At random means: in `PARTS` of a level, with a random number of them added, rounded down.

    Args:
        x: [numel]; NaN becomes level 0.
        scales: fp32 [ceil(numel / block_numel)], >= 0.
        block_numel: elements per scale.
        bits: of a level, 2, 4 or 8; levels stay within +-(2^(bits - 1) - 1), for a denormal scale has few bits, and the
            quotient may overshoot.
        multiplier: levels per scale.
        key: of the random numbers; None rounds to the nearest, ties to even.
        out: uint8 [ceil(numel * bits / 8)], overwritten: two's complement, as the codebook "levels" reads it.
    """
    most = (1 << (bits - 1)) - 1
    if _PACK.serves(*x.tensors, scales):
        _PACK(
            x.starts, x.borders, x.numel, divisors(scales), block_numel, multiplier, most, key is not None, key or 0,
            bits, out,
        )  # fmt: skip
        return
    relative = relative_to_blocks(x.flat, divisors(scales), block_numel)
    if key is None:
        levels = _within(relative * multiplier, most)
    else:
        parts = _within(relative * (PARTS * multiplier), PARTS * most)
        levels = (parts + (shared_words(key, x.numel, x.device) >> (32 - PART_BITS))) >> PART_BITS
    out.copy_(pack_bits(levels.to(torch.int8), bits))


def _within(x: torch.Tensor, most: int) -> torch.Tensor:
    """The nearest integers, ties to even, within +-most: int64."""
    return x.clamp_(-most, most).nan_to_num_(nan=0.0).round_().to(torch.int64)
