"""Counter-based random numbers, and random sets of positions that these numbers select.

A number depends only on a key (a seed) and on its index, so all devices get the same numbers in any order.

Source: Philox4x32-10, Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC11), section 4.3.
"""

import numpy as np
import torch

from collectives.kernels.loop import Int, LongArray, Loop, also_on_gpus
from collectives.payloads.fields import PayloadError

STRETCH = 64
COUNTERS = 16
ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 2**32 - 1

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Return four random 32-bit words for each counter; a counter also consists of four 32-bit words.

    Args:
        counter: the four words of each counter, int64 of any shape, 0..2^32 - 1.
        key: the two words of the key.

    Returns:
        Four int64 tensors of the counter's shape, 0..2^32 - 1.
    """
    c0, c1, c2, c3 = counter
    for number in range(ROUNDS):
        k0, k1 = ((word + number * step) & WORD for word, step in zip(key, KEY_STEPS, strict=True))
        product_0, product_2 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # 64 bits that may wrap into the sign
        c0, c1 = (product_2 >> 32) & WORD ^ c1 ^ k0, product_2 & WORD
        c2, c3 = (product_0 >> 32) & WORD ^ c3 ^ k1, product_0 & WORD
    return c0, c1, c2, c3


@also_on_gpus
def random_words(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the first `count` random 32-bit numbers that a key determines: int64 [count] on `device`.

    Number i is word i % 64 // 16 of the counter 16 * (i // 64) + i % 16. So each block of 64 numbers has the first
    words of 16 consecutive counters, then their second, third and fourth words.

    Args:
        key: the seed of the numbers, 0..2^64 - 1.
        count: number of words.
        device: device of the result.
    """
    counters = torch.arange(-(-count // STRETCH) * COUNTERS, device=device).view(-1, COUNTERS)
    zeros = torch.zeros_like(counters)
    words = philox4x32((counters & WORD, counters >> 32, zeros, zeros), (key & WORD, key >> 32))
    return torch.stack(words, dim=1).view(-1)[:count]


def shared_words(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Return `count` random 32-bit numbers that a key determines: int64 [count] on `device`.

    Two numbers are made from each random word: each block of 128 numbers has 64 words of `random_words`, then the same
    words with their 16-bit halves swapped. Each number is uniform, and the upper halves of the two numbers from one
    word are independent; stochastic rounding depends on the lower half only once in 65536 times. Rounding spends most
    of its time on random numbers, and this halves the time to generate them.

    Args:
        key: the seed of the numbers, 0..2^64 - 1.
        count: number of random numbers.
        device: device of the result.
    """
    words = random_words(key, -(-count // (2 * STRETCH)) * STRETCH, device).view(-1, STRETCH)
    swapped = (words << 16 | words >> 16) & WORD
    return torch.cat((words, swapped), dim=1).view(-1)[:count]


def uniform(words: torch.Tensor) -> torch.Tensor:
    """Return the upper 24 bits of 32-bit words as numbers in [0, 1): fp32 of the same shape."""
    return (words >> 8).float() * 2.0**-24


MOST = 2**32 - 1  # largest number of elements to draw from, because the random numbers have 32 bits
SPARSEST = 256  # up to this many elements per position, it pays to mark drawn elements in a bitmap

_DRAW = Loop("draw_positions", Int, Int, Int, LongArray, LongArray)


def check_numel(numel: int) -> None:
    """Raise PayloadError if `numel` is more than the elements among which a 32-bit random number can select."""
    if numel > MOST:
        raise PayloadError(f"positions are drawn among at most {MOST} elements; send smaller buckets")


def marks_for(numel: int, count: int) -> torch.Tensor | None:
    """Return a bitmap of zeros to mark drawn positions, int64 [ceil(numel / 64)]; None if it is not worth its memory.

    It is not worth its memory if `count` of `numel` positions are very few, or nearly all.
    """
    if numel > SPARSEST * min(count, numel - count):
        return None
    return torch.zeros(-(-numel // 64), dtype=torch.int64)


def seeded_positions(numel: int, count: int, seed: int) -> torch.Tensor:
    """Return a uniformly random set of positions: the first `count` different ones that the seed's numbers select.

    A random number w selects element w * numel // 2^32; numbers that would make some elements more likely are skipped.
    If `count` is more than half of `numel`, the positions to leave out are drawn instead.

    Args:
        numel: number of elements to draw from, at most 2^32 - 1.
        count: positions to draw, 0..numel.
        seed: 0..2^64 - 1.

    Returns:
        int64 [count] on the CPU, strictly ascending.

    Raises:
        PayloadError: `numel` is too large.
    """
    check_numel(numel)
    if _DRAW.serves() and (marks := marks_for(numel, count)) is not None:
        positions = torch.empty(count, dtype=torch.int64)
        _DRAW(numel, count, seed, marks, positions)
        return positions
    drawn = min(count, numel - count)
    positions = _first_distinct(numel, drawn, seed)
    if drawn == count:
        return positions
    others = torch.ones(numel, dtype=torch.bool)
    others[positions] = False
    return others.nonzero().view(-1)


def _first_distinct(numel: int, count: int, seed: int) -> torch.Tensor:
    """Return the first `count` different elements that the seed's random numbers select: int64 [count], ascending."""
    num_words = count + count // 4 + 8
    while True:
        products = random_words(seed, num_words, torch.device("cpu")).numpy().astype(np.uint64) * np.uint64(numel)
        fair = products[products & np.uint64(2**32 - 1) >= 2**32 % max(1, numel)]
        elements, first_named = np.unique(fair >> np.uint64(32), return_index=True)
        if len(elements) >= count:
            is_early = first_named.argsort(kind="stable").argsort(kind="stable") < count
            return torch.from_numpy(elements[is_early].astype(np.int64))
        num_words *= 2
