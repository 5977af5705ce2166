"""Elements as signed powers of two relative to their block's scale."""

from __future__ import annotations

import torch

from collectives.kernels.loop import ByteArray, FloatArray, Int, Longs, Loop, Parts, also_on_gpus
from collectives.payloads.codec.bits import pack_bits
from collectives.payloads.codec.philox import shared_words
from compressors.kernels.blocks import divisors, relative_to_blocks

MANTISSA_BITS = 23  # of fp32
EXPONENT_OF_ONE = 127  # how fp32 writes 2^0

_PACK = Loop("pack_powers", Longs, Longs, Int, FloatArray, Int, Int, Int, ByteArray)


@also_on_gpus
def pack_powers(x: Parts, scales: torch.Tensor, block_numel: int, *, bits: int, key: int, out: torch.Tensor) -> None:
    """Write codes of x / scale, rounded to a power of two without bias by the random numbers of a key.

    A random number added to the mantissa's bits carries into the exponent with the probability that is wanted. What
    lies below the smallest power that a code can name becomes it, or zero.

    Args:
        x: [numel]; NaN becomes 0.
        scales: fp32 [ceil(numel / block_numel)], powers of two at or above the magnitudes of their blocks, or 0.
        block_numel: elements per scale.
        bits: of a code, 4 or 8.
        key: of the random numbers.
        out: uint8 [ceil(numel * bits / 8)], overwritten, as the codebook "natural" reads it.
    """
    if _PACK.serves(*x.tensors, scales):
        _PACK(x.starts, x.borders, x.numel, divisors(scales), block_numel, key, bits, out)
        return
    relative = relative_to_blocks(x.flat, divisors(scales), block_numel)
    magnitude = relative.abs().nan_to_num_(nan=0.0).clamp_(max=1)
    num_exponents = (1 << (bits - 1)) - 1
    smallest = 2.0 ** (1 - num_exponents)
    is_below = magnitude < smallest
    mantissa = (magnitude + is_below.float() * smallest).view(torch.int32)  # below: its share of the smallest power
    chance = shared_words(key, x.numel, x.device) >> (32 - MANTISSA_BITS)
    exponent = ((mantissa + chance) >> MANTISSA_BITS) - is_below.int()
    codes = (EXPONENT_OF_ONE + 1 - exponent) & num_exponents
    is_negative = relative.signbit() & (codes > 0)
    out.copy_(pack_bits(codes + is_negative * (num_exponents + 1), bits))
