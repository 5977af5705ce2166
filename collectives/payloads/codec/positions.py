"""Positions that a seed gives: drawn without replacement, the same on every machine."""

from __future__ import annotations

import numpy as np
import torch

from collectives.kernels.loop import Int, Loop, array
from collectives.payloads.codec.philox import random_words
from collectives.payloads.errors import PayloadError

MOST = 2**32 - 1
"""elements that numbers of 32 bits tell apart"""
SPARSEST = 256
"""elements per position up to which a bit for every element is worth its memory"""

_LONGS = array(torch.int64)
_DRAW = Loop("draw_positions", Int, Int, Int, _LONGS, _LONGS)


def check_numel(numel: int) -> None:
    """Refuse to draw among more elements than 32 bits tell apart."""
    if numel > MOST:
        raise PayloadError(f"positions are drawn among at most {MOST} elements; send smaller buckets")


def has_marks(numel: int, count: int) -> bool:
    """Whether so many are drawn by marking them."""
    return numel <= SPARSEST * min(count, numel - count)


def marks_for(numel: int) -> torch.Tensor:
    """A bit for every element, none of them set: int64 [ceil(numel / 64)]."""
    return torch.zeros(-(-numel // 64), dtype=torch.int64)


def seeded_positions(numel: int, count: int, seed: int) -> torch.Tensor:
    """A uniformly random set of positions: of the seed's numbers, the first `count` that name different elements.

    Number w names element w * numel // 2^32; numbers of which there are too many to be shared out evenly are left out.
    Where more than half of all are asked for, the others are drawn.

    Args:
        numel: number of elements to draw from, at most 2^32 - 1.
        count: positions to draw, 0..numel.
        seed: 0..2^64 - 1.

    Returns:
        int64 [count] on the CPU, strictly ascending.

    Raises:
        PayloadError: there are more elements than numbers.
    """
    check_numel(numel)
    drawn = min(count, numel - count)
    if _DRAW.serves() and has_marks(numel, count):
        positions = torch.empty(count, dtype=torch.int64)
        _DRAW(numel, count, seed, marks_for(numel), positions)
        return positions
    positions = _first_distinct(numel, drawn, seed)
    if drawn == count:
        return positions
    others = torch.ones(numel, dtype=torch.bool)
    others[positions] = False
    return others.nonzero().view(-1)


def _first_distinct(numel: int, count: int, seed: int) -> torch.Tensor:
    """The first `count` different elements that the seed's numbers name, ascending."""
    num_words = count + count // 4 + 8
    while True:
        products = random_words(seed, num_words, torch.device("cpu")).numpy().astype(np.uint64) * np.uint64(numel)
        fair = products[products & np.uint64(2**32 - 1) >= 2**32 % max(1, numel)]
        elements, first_named = np.unique(fair >> np.uint64(32), return_index=True)
        if len(elements) >= count:
            is_early = first_named.argsort(kind="stable").argsort(kind="stable") < count
            return torch.from_numpy(elements[is_early].astype(np.int64))
        num_words *= 2
