"""A sum of values at positions, written once into tensors laid end to end, such as the layers of a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from collectives.kernels.loop import Float, Int, Longs, Loop, longs

if TYPE_CHECKING:
    from collectives.payloads.indexed_values import IndexedValues

_WRITE = Loop("write_sum", Longs, Longs, Longs, Longs, Longs, Int, Float, Int, Longs, Longs, Int)
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def write_sum_(terms: Sequence[IndexedValues], parts: Sequence[torch.Tensor], *, divisor: float) -> bool:
    """`parts`, laid end to end, become (term 0 + term 1 + ...) / divisor: the bits that adding them to zeros gives.

    Args:
        terms: of one length, at least one.
        parts: 1-D, as many elements together as a term; overwritten.
        divisor: of the sum.

    Returns:
        False, and nothing done, where no native loop serves these tensors.

    Raises:
        IndexError: positions do not ascend within the terms' length.
    """
    tensors = [*parts, *(term.values for term in terms)]
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in parts):
        return False
    if any(term.values.dtype not in _KINDS for term in terms) or not _WRITE.serves(*tensors):
        return False
    values = [term.values.contiguous() for term in terms]
    positions = [term.positions.contiguous() for term in terms]
    kinds = longs([_KINDS[held.dtype] for held in values])
    counts, following = _numels(values), longs([0] * len(values))
    divide_first = math.frexp(divisor)[0] == 0.5  # by a power of two, which is exact
    _WRITE(
        _addresses(values), kinds, _addresses(positions), counts, following, len(terms), divisor, divide_first,
        _addresses(parts), _numels(parts), len(parts),
    )  # fmt: skip
    if list(following) != list(counts):
        raise IndexError(f"positions do not ascend within the {sum(part.numel() for part in parts)} elements")
    return True


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return longs([tensor.data_ptr() for tensor in tensors])


def _numels(tensors: Sequence[torch.Tensor]) -> Any:
    return longs([tensor.numel() for tensor in tensors])
