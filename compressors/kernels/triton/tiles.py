"""What kernels do with the elements they hold: quotients by block, codes into bytes."""

import triton
import triton.language as tl


@triton.jit
def pack_tile(codes, BITS: tl.constexpr, HIGH_FIRST: tl.constexpr, TILE: tl.constexpr):
    """Bytes of integer codes that need no more than their low bits: uint8 [TILE * BITS / 8] from [TILE]."""
    PER_BYTE: tl.constexpr = 8 // BITS
    order = tl.arange(0, PER_BYTE)
    if HIGH_FIRST:
        order = PER_BYTE - 1 - order
    codes = codes.to(tl.int32) & ((1 << BITS) - 1)
    return tl.sum(tl.reshape(codes, (TILE // PER_BYTE, PER_BYTE)) << (order * BITS)[None, :], 1).to(tl.uint8)


@triton.jit
def store_bytes(out, packed, numel, BITS: tl.constexpr, TILE: tl.constexpr):
    """Write what this program has packed of `numel` codes."""
    NBYTES: tl.constexpr = TILE * BITS // 8
    places = tl.program_id(0).to(tl.int64) * NBYTES + tl.arange(0, NBYTES)
    tl.store(out + places, packed, mask=places < (tl.cast(numel, tl.int64) * BITS + 7) // 8)


@triton.jit
def magnitude_bits(x):
    """The bits of |x| of fp32 as integers, ordered as the magnitudes are, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def relative_tile(x, divisors, numel, block_numel, first, TILE: tl.constexpr):
    """Elements over their blocks' divisors, 0 beyond the end: fp32 [TILE]."""
    places = first + tl.arange(0, TILE)
    inside = places < numel
    block = first // block_numel + (tl.cast(first % block_numel, tl.int32) + tl.arange(0, TILE)) // block_numel
    divisor = tl.load(divisors + block, mask=inside, other=1.0)
    return tl.div_rn(tl.load(x + places, mask=inside, other=0.0), divisor)


@triton.jit
def finite_magnitude_bits(x):
    """The same with NaN as infinity."""
    return tl.minimum(magnitude_bits(x), 0x7F800000)
