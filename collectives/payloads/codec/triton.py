"""Triton kernels of the codec: random numbers, rounding to 16-bit floats, sums of 16-bit floats and of packed codes."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch

TILE = 4096
CODES_TILE = 2048


def random_words(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the first `count` random 32-bit numbers that the seed `key` determines: int64 [count] on `device`."""
    words = torch.empty(count, dtype=torch.int64, device=device)
    launch(_write_words, triton.cdiv(count, TILE), words, count, key, TILE=TILE)
    return words


@triton.jit(do_not_specialize=["key"])
def _write_words(out, count, key, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    places = first + tl.arange(0, TILE)
    tl.store(out + places, random_tile(key, first, TILE).to(tl.int64), mask=places < count)


@triton.jit
def random_tile(key, first, TILE: tl.constexpr):
    """Return TILE consecutive random numbers, uint32, of the sequence for the seed `key`, starting at number `first`.

    The sequence is the same as in `random_words`. `first` and TILE are multiples of 64.
    """
    counters = first // 4 + tl.arange(0, TILE // 4)
    c0 = counters.to(tl.uint32)
    c1 = (counters >> 32).to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    key_0 = (tl.zeros_like(counters) + key).to(tl.uint32)
    key_1 = ((tl.zeros_like(counters) + key) >> 32).to(tl.uint32)
    multiplier_0 = tl.full((TILE // 4,), 0xD2511F53, tl.uint32)
    multiplier_1 = tl.full((TILE // 4,), 0xCD9E8D57, tl.uint32)
    step_0 = tl.full((TILE // 4,), 0x9E3779B9, tl.uint32)
    step_1 = tl.full((TILE // 4,), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        low_0 = c0 * multiplier_0
        high_0 = tl.umulhi(c0, multiplier_0)
        low_2 = c2 * multiplier_1
        high_2 = tl.umulhi(c2, multiplier_1)
        c0 = high_2 ^ c1 ^ key_0
        c1 = low_2
        c2 = high_0 ^ c3 ^ key_1
        c3 = low_0
        key_0 += step_0
        key_1 += step_1
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [TILE / 4, 2, 2]; the last axes are bits of the word's index
    by_stretch = tl.reshape(words, (TILE // 64, 16, 2, 2))
    return tl.reshape(tl.permute(by_stretch, (0, 2, 3, 1)), (TILE,))


@triton.jit
def shared_tile(key, first, TILE: tl.constexpr):
    """Return TILE consecutive random numbers, uint32, of the sequence for the seed `key`, starting at number `first`.

    The sequence is the same as in `shared_words` in `philox.py`: 64 random words, then the same words with their 16-bit
    halves swapped, and so on. `first` and TILE are multiples of 128.
    """
    words = random_tile(key, first // 2, TILE // 2)
    pairs = tl.reshape(tl.join(words, (words << 16) | (words >> 16)), (TILE // 128, 64, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (TILE,))


@triton.jit
def uniform(numbers):
    """Return fp32 numbers in [0, 1), multiples of 2^-24, made from the upper bits of random uint32 numbers."""
    return (numbers >> 8).to(tl.float32) * 5.9604644775390625e-08


def round_values(x: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """Write fp32 `x`, clamped to +-limit and rounded to the 16-bit dtype of `out`, into `out`."""
    launch(
        _round, triton.cdiv(x.numel(), TILE), x, out.view(torch.int16), x.numel(), limit,
        IS_FP16=out.dtype == torch.float16, TILE=TILE,
    )  # fmt: skip


def sum_values(a: torch.Tensor, b: torch.Tensor, limit: float, out: torch.Tensor) -> None:
    """Write a + b, computed in fp32, clamped to +-limit and rounded once, into `out`; all are 16-bit floats."""
    launch(
        _sum, triton.cdiv(a.numel(), TILE), a.view(torch.int16), b.view(torch.int16), out.view(torch.int16),
        a.numel(), limit, IS_FP16=out.dtype == torch.float16, TILE=TILE,
    )  # fmt: skip


@triton.jit
def _round(x, out, numel, limit, IS_FP16: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    tl.store(out + places, _to_half(tl.load(x + places, mask=inside), limit, IS_FP16), mask=inside)


@triton.jit
def _sum(a, b, out, numel, limit, IS_FP16: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = places < numel
    total = _from_half(tl.load(a + places, mask=inside), IS_FP16) + _from_half(
        tl.load(b + places, mask=inside), IS_FP16
    )
    tl.store(out + places, _to_half(total, limit, IS_FP16), mask=inside)


@triton.jit
def _to_half(x, limit, IS_FP16: tl.constexpr):
    """Return fp32 `x`, clamped to +-limit and rounded to the nearest 16-bit float, as int16; NaN stays NaN."""
    most = tl.zeros_like(x) + limit
    x = tl.where(x > most, most, x)
    x = tl.where(x < -most, -most, x)
    if IS_FP16:
        return x.to(tl.float16).to(tl.int16, bitcast=True)
    bits = x.to(tl.uint32, bitcast=True)
    return tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0).to(tl.int16)


@triton.jit
def _from_half(half, IS_FP16: tl.constexpr):
    """Return the exact fp32 values of 16-bit floats; `half` has their bits as int16."""
    if IS_FP16:
        return half.to(tl.float16, bitcast=True).to(tl.float32)
    return (half.to(tl.int32) << 16).to(tl.float32, bitcast=True)


def add_codes_to_floats_(
    dense: torch.Tensor,
    terms: Sequence[tuple[torch.Tensor, torch.Tensor]],
    table: torch.Tensor,
    block_numel: int,
    divisor: float,
) -> None:
    """Add the sum of some tensors of packed codes, divided by `divisor`, to `dense` in one pass.

    Args:
        dense: fp32 [numel], contiguous, mutated.
        terms: (packed codes, scales) of each tensor; the tensors are added in this order.
        table: the values of the codes in each possible byte, fp32 [256, codes per byte].
        block_numel: elements per scale.
        divisor: the sum is divided by this number.
    """
    codes, scales = (
        torch.tensor([part.data_ptr() for part in kind], device=dense.device) for kind in zip(*terms, strict=True)
    )
    launch(
        _add_codes, triton.cdiv(dense.numel(), CODES_TILE),
        codes, scales, len(terms), table, dense, dense.numel(), block_numel, float(divisor),
        PER_BYTE=table.shape[1], IS_ALONE=len(terms) == 1, TILE=CODES_TILE,
    )  # fmt: skip


@triton.jit
def _add_codes(
    codes, scales, num_terms, table, dense, numel, block_numel, divisor,
    PER_BYTE: tl.constexpr, IS_ALONE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * TILE
    places = first + tl.arange(0, TILE)
    inside = places < numel
    block = places // block_numel
    total = _decoded(codes, scales, 0, table, places, block, inside, PER_BYTE)
    if not IS_ALONE:
        total += 0.0  # turns -0.0 into +0.0, as a sum that starts with zeros does; a single term keeps its sign
        for term in range(1, num_terms):
            total += _decoded(codes, scales, term, table, places, block, inside, PER_BYTE)
    before = tl.load(dense + places, mask=inside)
    tl.store(dense + places, before + tl.div_rn(total, tl.zeros_like(total) + divisor), mask=inside)


@triton.jit
def _decoded(codes, scales, term, table, places, block, inside, PER_BYTE: tl.constexpr):
    """Return the decoded elements with indices `places`, fp32 [TILE]: the values of their codes, times their scales.

    `codes` has the address of each tensor's codes, `scales` the address of its scales, and `term` is the index of the
    tensor to decode. `table` has the values of the codes in each possible byte.
    """
    packed = tl.load(codes + term).to(tl.pointer_type(tl.uint8))
    of_blocks = tl.load(scales + term).to(tl.pointer_type(tl.float32))
    byte = tl.load(packed + places // PER_BYTE, mask=inside, other=0).to(tl.int32)
    value = tl.load(table + byte * PER_BYTE + (places % PER_BYTE).to(tl.int32), mask=inside, other=0.0)
    return value * tl.load(of_blocks + block, mask=inside, other=0.0)
