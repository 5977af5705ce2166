"""Triton kernels of `compressors/kernels/ternary.py`."""

import math

import torch
import triton
import triton.language as tl

from collectives.kernels.loop import launch
from collectives.payloads.codec.triton import shared_tile, uniform
from collectives.payloads.codes import Codes
from compressors.kernels.ternary import LEVELS
from compressors.kernels.triton.tiles import pack_tile, store_bytes

TILE = 2048


def ternary(x: torch.Tensor, threshold: float, bits: int) -> torch.Tensor:
    """Return the levels or codes by a threshold."""
    out = _output(x, bits)
    launch(_ternary, triton.cdiv(x.numel(), TILE), x.contiguous(), out, x.numel(), threshold, BITS=bits, TILE=TILE)
    return out.view(torch.int8) if bits == LEVELS else out


def random_ternary(x: torch.Tensor, scale: float, key: int, bits: int, *, limit: float = math.inf) -> torch.Tensor:
    """Return levels or codes that are rounded at random."""
    out = _output(x, bits)
    launch(
        _random_ternary, triton.cdiv(x.numel(), TILE),
        x.contiguous(), out, x.numel(), scale, limit, key, BITS=bits, TILE=TILE,
    )  # fmt: skip
    return out.view(torch.int8) if bits == LEVELS else out


def _output(x: torch.Tensor, bits: int) -> torch.Tensor:
    return x.new_empty(x.numel(), dtype=torch.uint8) if bits == LEVELS else Codes.room(x.numel(), bits, x.device)


@triton.jit
def _ternary(x, out, numel, threshold, BITS: tl.constexpr, TILE: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    element = tl.load(x + places, mask=places < numel, other=0.0)
    bound = tl.zeros_like(element) + tl.cast(threshold, tl.float32)
    _store(out, (element >= bound).to(tl.int32) - (element <= -bound).to(tl.int32), numel, BITS, TILE)


@triton.jit(do_not_specialize=["key"])
def _random_ternary(x, out, numel, scale, limit, key, BITS: tl.constexpr, TILE: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * TILE
    places = first + tl.arange(0, TILE)
    element = tl.load(x + places, mask=places < numel, other=0.0)
    most = tl.zeros_like(element) + tl.cast(limit, tl.float32)
    magnitude = tl.where(tl.abs(element) > most, most, tl.abs(element))
    is_chosen = uniform(shared_tile(key, first, TILE)) * tl.cast(scale, tl.float32) < magnitude
    sign = (element > 0).to(tl.int32) - (element < 0).to(tl.int32)
    _store(out, tl.where(is_chosen, sign, 0), numel, BITS, TILE)


@triton.jit
def _store(out, levels, numel, BITS: tl.constexpr, TILE: tl.constexpr):
    """Store levels as bytes or as codes of two bits, 11 for +1 and 10 for -1, the first in the highest bits."""
    if BITS == 2:
        levels = (levels & 2) | (levels > 0).to(tl.int32) * 3
    store_bytes(out, pack_tile(levels, BITS, True, TILE), numel, BITS, TILE)
