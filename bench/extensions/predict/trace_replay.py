"""Replay of a trace: steps on links whose rate changes, simulated from the start of the trace through whole periods.

A period is divided into equal shares. A simulated step that is shorter than a share stands for all steps that would be
made in one share, and the next simulated step begins a share later. So a trace of an hour does not need ten thousand
simulated steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from bench.extensions.predict.links import Floats

LEAST_STEPS = 16
# Most steps that are simulated for one period.
MOST_STEPS = 500
# Most messages in all of these steps, unless `LEAST_STEPS` steps have more.
MOST_MESSAGES = 2_000_000
WINDOWS = 10


class StepSimulation(Protocol):
    """A simulation of steps.

    Attributes:
        exposed_s: seconds of the last step in which each rank waited for the exchange, float [ranks].
    """

    exposed_s: Floats

    def run(self, starts: Floats) -> Floats:
        """Simulate a step that begins at `starts` on each rank; return the times at which it ends, float [ranks]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A part of a trace.

    Attributes:
        begin_s, end_s: seconds since the trace began.
        step_time_s: mean step time in this part.
    """

    begin_s: float
    end_s: float
    step_time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceResult:
    """Step times over a trace.

    Attributes:
        step_time_s, exposed_s: means over all steps.
        step_time_p95_s: 95th percentile of the step times.
        slowest, fastest: the tenths of the trace with the slowest and fastest steps; None if a step takes longer than
            the trace.
    """

    step_time_s: float
    exposed_s: float
    step_time_p95_s: float
    slowest: Window | None
    fastest: Window | None

    def differences(self) -> dict[str, Any]:
        """Return the values that show how step times vary, by the field names of a prediction."""
        windows = {"slowest_window": self.slowest, "fastest_window": self.fastest}
        return {"step_time_p95_s": self.step_time_p95_s, **windows}


def steps_for(messages_per_step: float) -> int:
    """Return how many steps to simulate for one period."""
    return int(np.clip(MOST_MESSAGES / messages_per_step, LEAST_STEPS, MOST_STEPS))


def replay(step: StepSimulation, starts: Floats, *, period_s: float, at_least_s: float, most_steps: int) -> TraceResult:
    """Simulate steps over whole periods of a trace.

    Args:
        step: simulates one step.
        starts: start times of the first step, float [ranks]; delayed until the trace repeats.
        period_s: period of the trace.
        at_least_s: shortest time of a step.
        most_steps: number of shares of a period, which is the most steps that are simulated in it.
    """
    share_s = period_s / most_steps
    begin = math.ceil(starts.max() / period_s) * period_s
    until, rounds = math.inf, 0
    moments, made, seconds, exposed = [begin], [0.0], [], []
    ends = starts
    while moments[-1] < until:
        starts = ends + (moments[-1] - ends.max())
        ends = step.run(starts)
        alone_s = float(ends.max() - starts.max())
        seconds.append(max(alone_s, at_least_s))
        exposed.append(float(step.exposed_s.mean()) + seconds[-1] - alone_s)
        lasts_s = max(seconds[-1], share_s)
        moments.append(moments[-1] + lasts_s)
        made.append(made[-1] + lasts_s / seconds[-1])
        if len(seconds) == LEAST_STEPS:
            rounds = math.ceil((moments[-1] - begin) / period_s)
            until = begin + rounds * period_s
    windows = [] if rounds > LEAST_STEPS else _windows(np.array(moments) - begin, made, period_s, rounds)
    weights = np.diff(made)
    return TraceResult(
        step_time_s=rounds * period_s / float(np.interp(until, moments, made)),
        exposed_s=float(np.average(exposed, weights=weights)),
        step_time_p95_s=_percentile(np.array(seconds), weights, 0.95),
        slowest=max(windows, key=lambda window: window.step_time_s, default=None),
        fastest=min(windows, key=lambda window: window.step_time_s, default=None),
    )


def _windows(moments: Floats, made: Sequence[float], period_s: float, rounds: int) -> list[Window]:
    """Return the tenths of a replayed trace, averaged over its rounds; `made` counts the steps until each moment."""
    edges = np.linspace(0.0, rounds * period_s, rounds * WINDOWS + 1)
    steps = np.diff(np.interp(edges, moments, made)).reshape(rounds, WINDOWS).mean(0)
    length_s = period_s / WINDOWS
    return [
        Window(begin_s=number * length_s, end_s=(number + 1) * length_s, step_time_s=length_s / float(made_in_it))
        for number, made_in_it in enumerate(steps)
    ]


def _percentile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order[np.searchsorted(shares, share)]])
