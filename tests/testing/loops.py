"""The tests that hold native loops against the reference path are marked `loops`, and skipped where there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
import torch

from collectives.kernels import library
from tests.testing.hard_numbers import hard_numbers

needs_loops = [
    pytest.mark.loops,
    pytest.mark.skipif(library.library() is None, reason=f"no native loops: {library.found().finding}"),
]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(a: torch.Tensor | float, b: torch.Tensor | float) -> bool:
    """Whether all bits agree, where the bits of a NaN, which no standard fixes, do not count."""
    a, b = (value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64) for value in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits)[~a.isnan()], b.contiguous().view(bits)[~b.isnan()])


def assert_gives_what_the_reference_gives(
    computed: Callable[[torch.Tensor, int], Sequence[torch.Tensor | float]], cases: Iterable[int]
) -> None:
    """Compute results of hard numbers by native loops and by the reference path; every bit must agree.

    Args:
        computed: fp32 [numel] and the case's number -> results.
        cases: numbers of the cases.
    """
    for seed in cases:
        x = hard_numbers(seed)
        with library.reference_path():
            expected = computed(x, seed)
        for mine, theirs in zip(computed(x, seed), expected, strict=True):
            assert same(mine, theirs), f"case {seed}"
