"""Packed codes added to a dense tensor: a table says what the codes of every byte stand for, in units of a scale."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from collectives.kernels.gpu import also_on_gpus
from collectives.kernels.loop import Float, Int, Loop, array
from collectives.payloads.codec.values import divided
from collectives.payloads.errors import PayloadError

Term = tuple[torch.Tensor, torch.Tensor]
"""packed codes, uint8 [ceil(numel * bits / 8)], and scales, floating [ceil(numel / block_numel)]"""

_FLOATS, _LONGS = array(torch.float32), array(torch.int64)
_ADD = Loop("add_codes", _LONGS, _LONGS, Int, _FLOATS, Int, Int, Float, Float, _FLOATS, Int)


def add_codes_(
    dense: torch.Tensor,
    terms: Sequence[Term],
    table: torch.Tensor,
    *,
    block_numel: int,
    divisor: float = 1.0,
    sign: float = 1.0,
) -> None:
    """`dense += sign * (term 0 + term 1 + ...) / divisor`, in one pass over `dense`.

    Args:
        dense: floating [numel], mutated.
        terms: added in their order, in fp32.
        table: fp32 [256, 8 / bits], contiguous: the values that each byte of codes stands for, in order.
        block_numel: elements per scale, at least 1.
        divisor: of the sum.
        sign: 1 or -1.

    Raises:
        PayloadError: `dense` is longer than the codes.
    """
    parts = [(packed.contiguous(), scales.float().contiguous()) for packed, scales in terms]
    held = min(min(len(packed) * table.shape[1], len(scales) * block_numel) for packed, scales in parts)
    if dense.numel() > held:
        raise PayloadError(f"codes of {held} elements cannot be added to {dense.numel()}")
    add = add_codes_to_floats_ if dense.dtype == torch.float32 and dense.is_contiguous() else _add_decoded
    add(dense, parts, table, block_numel, divisor, sign)


@also_on_gpus
def add_codes_to_floats_(
    dense: torch.Tensor, terms: Sequence[Term], table: torch.Tensor, block_numel: int, divisor: float, sign: float
) -> None:
    """`add_codes_` for fp32 that is contiguous, as all of the terms."""
    if not _ADD.serves(dense, *(tensor for term in terms for tensor in term)):
        _add_decoded(dense, terms, table, block_numel, divisor, sign)
        return
    codes, scales = (torch.tensor([part.data_ptr() for part in kind]) for kind in zip(*terms, strict=True))
    _ADD(codes, scales, len(terms), table, table.shape[1], block_numel, sign, divisor, dense, dense.numel())


def _add_decoded(
    dense: torch.Tensor, terms: Sequence[Term], table: torch.Tensor, block_numel: int, divisor: float, sign: float
) -> None:
    values = [_decoded(packed, scales, table, block_numel, dense.numel()) for packed, scales in terms]
    total = values[0] if len(values) == 1 else functools.reduce(torch.add, values, torch.zeros_like(values[0]))
    dense.add_(divided(total, sign * divisor, dense.dtype))


def _decoded(
    packed: torch.Tensor, scales: torch.Tensor, table: torch.Tensor, block_numel: int, numel: int
) -> torch.Tensor:
    """fp32 [numel], freshly made."""
    values = table[packed.to(torch.int32)].view(-1)[:numel]
    return values * scales.repeat_interleave(min(block_numel, numel))[:numel]
