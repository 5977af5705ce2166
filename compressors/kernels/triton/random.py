"""Triton kernel of `compressors/kernels/random.py`."""

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from collectives.payloads.codec.triton import random_tile, uniform

TILE = 4096


def uniform_numbers(key: int, count: int, device: torch.device) -> torch.Tensor:
    """Return random numbers in [0, 1): fp32 [count]."""
    numbers = torch.empty(count, device=device)
    launch(_write_numbers, triton.cdiv(count, TILE), numbers, count, key, TILE=TILE)
    return numbers


@triton.jit(do_not_specialize=["key"])
def _write_numbers(out, count, key, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    places = first + tl.arange(0, TILE)
    tl.store(out + places, uniform(random_tile(key, first, TILE)), mask=places < count)
