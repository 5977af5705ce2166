"""Sets of intervals against sets of whole numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bench.extensions.trace.intervals import Intervals, common, joined, lengths, minus, union

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)), max_size=8)


def intervals(spans: list[tuple[int, int]]) -> Intervals:
    starts = np.array([start for start, _ in spans], dtype=np.float64)
    return union(starts, starts + np.array([length for _, length in spans], dtype=np.float64))


def numbers(spans: list[tuple[int, int]]) -> set[int]:
    return {number for start, length in spans for number in range(start, start + length)}


def covered(found: Intervals) -> set[int]:
    starts, ends = found
    assert (starts < ends).all()
    assert (starts[1:] > ends[:-1]).all()
    return {number for start, end in zip(starts, ends, strict=True) for number in range(int(start), int(end))}


@given(SPANS, SPANS)
def test_sets(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    first, second = intervals(one), intervals(other)
    assert covered(first) == numbers(one)
    assert covered(joined(first, second)) == numbers(one) | numbers(other)
    assert covered(common(first, second)) == numbers(one) & numbers(other)
    assert covered(minus(first, second)) == numbers(one) - numbers(other)
    windows = np.array([0.0, 3.0, 7.0]), np.array([3.0, 7.0, 60.0])
    expected = [len(numbers(one) & {*range(int(a), int(b))}) for a, b in zip(*windows, strict=True)]
    assert lengths(first, *windows).tolist() == expected
