"""What goes on at once and shares something, event by event: how long each takes depends on who else is at it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import simpy

from bench.extensions.predict.arrays import Floats

Rates = Callable[[npt.NDArray[np.bool_]], Floats]
"""who is at work, bool [count] -> how much of it each gets done in a second, float [count]; 0 for the others"""


class FairShareQueue:
    """Amounts that become less at rates which change whenever one begins or ends.

    Args:
        env: whose clock counts.
        count: of those who share.
        rates: of all of them.
    """

    def __init__(self, env: simpy.Environment, count: int, rates: Rates) -> None:
        self._env, self._rates_of = env, rates
        self._busy = np.zeros(count, dtype=np.bool_)
        self._left, self._rates = np.zeros(count), np.zeros(count)
        self._ends = np.full(count, np.inf)
        self._done: list[simpy.Event | None] = [None] * count
        self._now = 0.0
        self._alarms = 0

    def begin(self, index: int, amount: float) -> simpy.Event:
        """Let one of them, which is not at work, begin; happens when so much is done."""
        assert not self._busy[index]
        done = self._done[index] = self._env.event()
        self._move_on()
        self._busy[index], self._left[index] = True, amount
        self._share()
        return done

    def rate_with(self, index: int) -> float:
        """The rate at which one of them works now, or would if it were at work."""
        busy = self._busy.copy()
        busy[index] = True
        return float(self._rates_of(busy)[index])

    def _move_on(self) -> None:
        self._left -= self._rates * (self._env.now - self._now)
        self._now = self._env.now

    def _share(self) -> None:
        """Find all rates anew, and wake up when the next one is done."""
        busy = self._busy
        self._rates = self._rates_of(busy)
        self._ends = np.full(len(busy), np.inf)
        self._ends[busy] = self._now + np.maximum(0.0, self._left[busy]) / self._rates[busy]
        self._alarms += 1
        if busy.any():
            alarm = self._env.timeout(max(0.0, float(self._ends.min()) - self._now), value=self._alarms)
            assert alarm.callbacks is not None  # only what has happened has none
            alarm.callbacks.append(lambda event: self._end(event.value))

    def _end(self, alarm: int) -> None:
        """The first are done, unless rates were found anew since the alarm was set."""
        if alarm != self._alarms:
            return
        ended = np.flatnonzero(self._ends == self._ends.min())
        self._move_on()
        self._busy[ended] = False
        self._share()
        for index in ended.tolist():
            done, self._done[index] = self._done[index], None
            assert done is not None
            done.succeed()
