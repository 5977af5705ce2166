"""Checks of native loops and of Triton's kernels against the reference path; skipped if there are none.

Triton's kernels run on a GPU, or in Triton's interpreter if TRITON_INTERPRET=1 is in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch

from collectives.kernels import library
from tests.testing.hard_numbers import hard_numbers

needs_loops = [
    pytest.mark.loops,
    pytest.mark.skipif(library.library() is None, reason=f"no native loops: {library.found().finding}"),
]

Computed = Callable[[torch.Tensor, int], Sequence[torch.Tensor | float]]
"""(fp32 [numel], number of the case) -> results"""

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
"""The device for Triton's kernels."""
NO_TRITON = library.triton_missing() or ("" if DEVICE == "cpu" or torch.cuda.is_available() else "torch sees no GPU")

needs_triton = [pytest.mark.triton, pytest.mark.skipif(bool(NO_TRITON), reason=NO_TRITON or "there is one")]


@contextlib.contextmanager
def on_triton() -> Iterator[None]:
    """Use Triton's kernels for tensors on `DEVICE` in a `with` block; on a machine with a GPU they are the default."""
    with library.serving("triton") if DEVICE == "cpu" else contextlib.nullcontext(), np.errstate(all="ignore"):
        yield


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same(a: torch.Tensor | float, b: torch.Tensor | float) -> bool:
    """Return whether all bits agree; the bits of a NaN, which no standard defines, do not count."""
    a, b = (value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64) for value in (a, b))
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    bits = _BITS[a.element_size()]
    return torch.equal(a.contiguous().view(bits)[~a.isnan()], b.contiguous().view(bits)[~b.isnan()])


def assert_gives_what_the_reference_gives(computed: Computed, cases: Iterable[int]) -> None:
    """Compute results of difficult numbers by native loops and by the reference path; every bit must agree.

    Args:
        computed: computes the results.
        cases: numbers of the cases.
    """
    for seed in cases:
        x = hard_numbers(seed)
        with library.serving("reference"):
            expected = computed(x, seed)
        for mine, theirs in zip(computed(x, seed), expected, strict=True):
            assert same(mine, theirs), f"case {seed}"


def assert_triton_gives_what_the_reference_gives(computed: Computed, cases: Iterable[int]) -> None:
    """Compare Triton's kernels, on a GPU or in the interpreter, with the reference path on the CPU."""
    for seed in cases:
        with library.serving("reference"):
            expected = computed(hard_numbers(seed), seed)
        with on_triton():
            results = computed(hard_numbers(seed, device=DEVICE), seed)
        for mine, theirs in zip(results, expected, strict=True):
            assert same(mine.cpu() if isinstance(mine, torch.Tensor) else mine, theirs), f"case {seed}"
