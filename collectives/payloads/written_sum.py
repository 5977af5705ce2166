"""A sum of values at positions, written once into tensors laid end to end, such as the layers of a bucket."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from collectives.kernels.loop import Float, Int, Longs, Loop, longs

_WRITE = Loop("write_sum", Longs, Longs, Longs, Longs, Longs, Int, Float, Int, Longs, Longs, Int)
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def write_sum_(
    values: Sequence[torch.Tensor], positions: Sequence[torch.Tensor], parts: Sequence[torch.Tensor], *, divisor: float
) -> bool:
    """`parts`, laid end to end, become (term 0 + term 1 + ...) / divisor: the bits that adding them to zeros gives.

    Args:
        values: of each term, at least one; floating, 1-D.
        positions: theirs, int64 [as many], ascending.
        parts: 1-D, as many elements together as a term stands for; overwritten.
        divisor: of the sum.

    Returns:
        False, and nothing done, where no native loop serves these tensors.

    Raises:
        IndexError: positions do not ascend within the terms' length.
    """
    tensors = [*parts, *values]
    if any(part.dtype != torch.float32 or not part.is_contiguous() for part in parts):
        return False
    if any(held.dtype not in _KINDS for held in values) or not _WRITE.serves(*tensors):
        return False
    values, positions = ([held.contiguous() for held in each] for each in (values, positions))
    kinds = longs([_KINDS[held.dtype] for held in values])
    counts, following = _numels(values), longs([0] * len(values))
    divide_first = math.frexp(divisor)[0] == 0.5  # by a power of two, which is exact
    _WRITE(
        _addresses(values), kinds, _addresses(positions), counts, following, len(values), divisor, divide_first,
        _addresses(parts), _numels(parts), len(parts),
    )  # fmt: skip
    if list(following) != list(counts):
        raise IndexError(f"positions do not ascend within the {sum(part.numel() for part in parts)} elements")
    return True


def _addresses(tensors: Sequence[torch.Tensor]) -> Any:
    return longs([tensor.data_ptr() for tensor in tensors])


def _numels(tensors: Sequence[torch.Tensor]) -> Any:
    return longs([tensor.numel() for tensor in tensors])
