"""Triton kernels of the Philox random numbers, written to memory or used in registers by other kernels.

Only Triton's interpreter has run these kernels, no GPU.
"""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch

TILE = 4096


def random_words(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the first `count` random words of a key: int64 [count] on `device`."""
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
    """Return words first .. first + TILE - 1 of a key: uint32 [TILE]; `first` and TILE are multiples of 64."""
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
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [TILE / 4, 2, 2]; the last two are the bits of the word's index
    by_stretch = tl.reshape(words, (TILE // 64, 16, 2, 2))
    return tl.reshape(tl.permute(by_stretch, (0, 2, 3, 1)), (TILE,))


@triton.jit
def shared_tile(key, first, TILE: tl.constexpr):
    """Return numbers first .. first + TILE - 1 of `shared_words`: uint32 [TILE]; both are multiples of 128."""
    words = random_tile(key, first // 2, TILE // 2)
    pairs = tl.reshape(tl.join(words, (words << 16) | (words >> 16)), (TILE // 128, 64, 2))
    return tl.reshape(tl.permute(pairs, (0, 2, 1)), (TILE,))


@triton.jit
def uniform(numbers):
    """Return fp32 numbers in [0, 1) that are multiples of 2^-24."""
    return (numbers >> 8).to(tl.float32) * 5.9604644775390625e-08
