"""Draw one step of each rank as two lanes: compute above exchange, whose exposed parts stand out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.core.errors import UsageError
from bench.core.units import format_seconds, scale_of
from bench.extensions.trace.collectives import SplitCalls
from bench.extensions.trace.intervals import Intervals, common, union
from bench.extensions.trace.kineto import Recording
from bench.extensions.trace.steps import PARTS, RankSteps, TracedJob
from bench.report.plots import style

_MOST_RANKS = 8
_MOST_BARS = 1500  # per lane and part; narrower gaps are not drawn, because nobody would see them
_LOOKS: dict[str, dict[str, Any]] = {
    "compute_s": {"facecolor": style.PALETTE[2]},
    "encoding_s": {"facecolor": style.PALETTE[3]},
    "hidden": {"facecolor": "#d9d9d9"},
    "exposed_transfer_s": {"facecolor": style.PALETTE[1]},
    "exposed_wait_s": {"facecolor": style.PALETTE[7], "edgecolor": style.PALETTE[1], "hatch": "////"},
    "exposed_unsplit_s": {"facecolor": style.PALETTE[5]},
}
_NAMES = PARTS | {"hidden": "hidden exchange"}


def draw(recordings: Sequence[Recording], job: TracedJob, number: int | None) -> style.Picture:
    """Draw a step that all ranks recorded.

    Args:
        recordings: the ranks' recordings.
        job: the answer about them.
        number: the step's number in the trace; None for the step of median length.

    Raises:
        UsageError: a rank did not record the step.
    """
    shared = sorted(set.intersection(*({*each.numbers} for each in job.ranks)))
    if number is None:
        number = sorted(shared, key=lambda step: _length(job, step))[len(shared) // 2]
    elif number not in shared:
        raise UsageError(f"not every rank recorded step {number}; choose one of {_listed(shared)}")
    shown = _shown(job)
    with style.applied():
        figure, (axes,) = style.new_figure(height=0.9 + 0.62 * len(shown))
        legend: dict[str, Any] = {}
        offsets = _offsets(recordings, job, number, shown)
        length_s = max(
            offset + _span(recordings[index], number)[1] for index, offset in zip(shown, offsets, strict=True)
        )
        for lane, (index, offset) in enumerate(zip(shown, offsets, strict=True)):
            _lanes(axes, legend, recordings[index], job.ranks[index], number, (lane, offset))
        labels = [f"rank {job.ranks[index].rank}" for index in shown]
        axes.set_yticks(range(len(shown)), labels)
        axes.set(ylim=(len(shown) - 0.45, -0.55), xlim=(min(0.0, *offsets), length_s))
        axes.grid(visible=False, axis="y")
        divisor, unit = scale_of("s", length_s)
        style.write_ticks(axes, "x", divisor)
        axes.set_xlabel(f"time in the step ({unit}); above: compute and encoding, below: exchange")
        ranks = f", {len(shown)} of {len(job.ranks)} ranks" if len(shown) < len(job.ranks) else ""
        axes.set_title(f"Step {number}, {format_seconds(_length(job, number))}{ranks}")
        means = ", ".join(
            f"{name} {format_seconds(mean)}" for part, name in PARTS.items() if (mean := job.parts[part]) is not None
        )
        order = [name for part in _LOOKS if (name := _NAMES[part]) in legend]
        return style.with_legend(
            figure, {name: legend[name] for name in order}, f"Step {number} as lanes per rank; means: {means}."
        )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")


def _length(job: TracedJob, number: int) -> float:
    return max(float(each.step_s[each.numbers.index(number)]) for each in job.ranks if number in each.numbers)


def _span(recording: Recording, number: int) -> tuple[float, float]:
    start, end = recording.steps[number]
    return start, end - start


def _shown(job: TracedJob) -> list[int]:
    """Return the ranks to draw: all, or the late ones and the first."""
    late = {each.rank for each in job.late[: _MOST_RANKS // 2]}
    order = sorted(range(len(job.ranks)), key=lambda index: job.ranks[index].rank not in late)
    return sorted(order[:_MOST_RANKS])


def _offsets(recordings: Sequence[Recording], job: TracedJob, number: int, shown: Sequence[int]) -> list[float]:
    """Return how much later each rank begins the step than the first one, from the common ends of their exchanges."""
    ends = [_ends(recordings[index], job.ranks[index].calls, number) for index in shown]
    starts = [_span(recordings[index], number)[0] for index in shown]
    found = []
    for own, start in zip(ends, starts, strict=True):
        if len(own) and len(own) == len(ends[0]):
            found.append(float(np.median((ends[0] - starts[0]) - (own - start))))
        else:
            found.append(0.0)
    return found


def _ends(recording: Recording, calls: SplitCalls, number: int) -> np.ndarray[Any, Any]:
    start, length = _span(recording, number)
    return calls.end_s[(calls.late >= 0) & (calls.end_s >= start) & (calls.end_s < start + length)]


def _lanes(
    axes: Any, legend: dict[str, Any], recording: Recording, rank: RankSteps, number: int, place: tuple[int, float]
) -> None:
    """Draw the two lanes of a rank at a place: the index of the lane, and when the rank begins the step."""
    lane, offset = place
    start, length = _span(recording, number)
    step: Intervals = (np.array([start]), np.array([start + length]))
    exchanging = union(rank.calls.start_s, rank.calls.end_s)
    for part in _LOOKS:
        busy = common(exchanging if part == "hidden" else rank.sets[part], step)
        starts, ends = _visible(busy, length / _MOST_BARS)
        if not len(starts):
            continue
        top = lane - 0.38 if part in ("compute_s", "encoding_s") else lane
        bars = [(begin - start + offset, end - begin) for begin, end in zip(starts, ends, strict=True)]
        artist = axes.broken_barh(bars, (top, 0.36), linewidth=0.0, **_LOOKS[part])
        seconds = format_seconds(float((busy[1] - busy[0]).sum()))
        style.tooltips(artist, f"rank {rank.rank}, {_NAMES[part]}: {seconds}")
        legend[_NAMES[part]] = artist


def _visible(busy: Intervals, gap: float) -> Intervals:
    """Close gaps that are too short to be seen."""
    starts, ends = busy
    if not len(starts):
        return busy
    is_first = np.append(True, starts[1:] - ends[:-1] > gap)
    first = np.flatnonzero(is_first)
    return starts[first], ends[np.append(first[1:] - 1, len(ends) - 1)]
