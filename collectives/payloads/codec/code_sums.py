"""Packed codes added to a dense tensor: a table says what the codes of every byte stand for, in units of a scale."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from collectives.kernels.gpu import also_on_gpus
from collectives.kernels.loop import Float, Int, Longs, Loop, array, longs
from collectives.payloads.codec.values import divided
from collectives.payloads.errors import PayloadError

Term = tuple[torch.Tensor, torch.Tensor]
"""packed codes, uint8 [ceil(numel * bits / 8)], and scales, floating [ceil(numel / block_numel)]"""

_FLOATS = array(torch.float32)
_ADD = Loop("add_codes", Longs, Longs, Int, _FLOATS, Int, Int, Float, Float, _FLOATS, Int)
_WRITE = Loop("write_codes", Longs, Longs, Int, _FLOATS, Int, Int, Float, Int, _FLOATS, Int)


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
    parts = _readable(terms, table, block_numel, dense.numel())
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
    _ADD(*_addresses(terms), len(terms), table, table.shape[1], block_numel, sign, divisor, dense, dense.numel())


def write_codes_(
    parts: Sequence[torch.Tensor],
    terms: Sequence[Term],
    table: torch.Tensor,
    *,
    block_numel: int,
    divisor: float,
) -> bool:
    """`parts`, laid end to end, become what `add_codes_` would leave in zeros: one pass that reads nothing of them.

    Args:
        parts: floating and 1-D; overwritten.
        terms: as there; without any the parts become zeros.
        table: as there.
        block_numel: as there.
        divisor: of the sum.

    Returns:
        False, and nothing done, where no native loop serves these tensors.

    Raises:
        PayloadError: the parts are longer than the codes.
    """
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in parts):
        return False
    if not _WRITE.serves(*parts, *(tensor for term in terms for tensor in term)):
        return False
    readable = _readable(terms, table, block_numel, sum(part.numel() for part in parts))
    codes, scales = _addresses(readable)
    first = 0
    for part in parts:
        _WRITE(codes, scales, len(terms), table, table.shape[1], block_numel, divisor, first, part, part.numel())
        first += part.numel()
    return True


def _readable(terms: Sequence[Term], table: torch.Tensor, block_numel: int, numel: int) -> list[Term]:
    """The terms as loops read them.

    Raises:
        PayloadError: they are shorter than `numel`.
    """
    readable = [(packed.contiguous(), scales.float().contiguous()) for packed, scales in terms]
    for packed, scales in readable:
        held = min(len(packed) * table.shape[1], len(scales) * block_numel)
        if numel > held:
            raise PayloadError(f"codes of {held} elements cannot be added to {numel}")
    return readable


def _addresses(terms: Sequence[Term]) -> tuple[Any, Any]:
    """Where the terms' codes begin, and where their scales do."""
    return longs([packed.data_ptr() for packed, _ in terms]), longs([scales.data_ptr() for _, scales in terms])


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
