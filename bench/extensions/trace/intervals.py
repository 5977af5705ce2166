"""Sets of time intervals: union, difference, intersection, and their length inside windows.

A set is a pair of arrays (starts, ends), float64 [n], in seconds: ascending, disjoint, and without empty intervals.
"""

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.float64]
Intervals = tuple[Times, Times]

EMPTY: Intervals = (np.empty(0), np.empty(0))


def union(starts: Times, ends: Times) -> Intervals:
    """Return the set that these intervals cover, which may overlap, be empty and have any order."""
    kept = ends > starts
    starts, ends = starts[kept], ends[kept]
    if not len(starts):
        return EMPTY
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    first = np.flatnonzero(np.append(True, starts[1:] > reached[:-1]))
    return starts[first], reached[np.append(first[1:] - 1, len(starts) - 1)]


def joined(*sets: Intervals) -> Intervals:
    """Return the set of all times that are in at least one of these sets."""
    return union(np.concatenate([starts for starts, _ in sets]), np.concatenate([ends for _, ends in sets]))


def common(one: Intervals, other: Intervals) -> Intervals:
    """Return the set of all times that are in both sets."""
    times = np.concatenate([one[0], other[0], one[1], other[1]])
    num_starts = len(one[0]) + len(other[0])
    change = np.repeat([1, -1], [num_starts, len(times) - num_starts])
    order = np.lexsort((change, times))  # at equal times, intervals end before others start
    times, depth = times[order], np.cumsum(change[order])
    inside = np.flatnonzero(depth[:-1] == 2)
    return union(times[inside], times[inside + 1])


def minus(one: Intervals, other: Intervals) -> Intervals:
    """Return the set of all times that are in `one` and not in `other`."""
    outside = (np.append(-np.inf, other[1]), np.append(other[0], np.inf))
    return common(one, outside)


def lengths(of: Intervals, starts: Times, ends: Times) -> Times:
    """Return the length of a set inside each of several windows, float64 like `starts`, in seconds."""
    return np.maximum(_before(of, ends) - _before(of, starts), 0.0)


def _before(of: Intervals, times: Times) -> Times:
    """Return the length of a set before each of these times."""
    if not len(of[0]):
        return np.zeros_like(times)
    whole = np.append(0.0, np.cumsum(of[1] - of[0]))
    index = np.searchsorted(of[0], times, side="right")
    last = np.maximum(index - 1, 0)
    return np.where(index > 0, whole[last] + np.minimum(times, of[1][last]) - of[0][last], 0.0)
