"""A budget of seconds, shared among parts of a measurement that are made one after the other."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

PRIOR_S = 3.0
"""seconds that are taken to have met expectations before anything was measured"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One part, and what it is expected to take.

    Attributes:
        text: names it, for people and in the file of what was measured.
        once_s: seconds that it takes however often its measurement is repeated.
        fixed_s: seconds of a repetition.
        full, least: repetitions where there is time for all, and where there is hardly any.
    """

    text: str
    once_s: float = 0.0
    fixed_s: float = 0.0
    full: int = 1
    least: int = 1

    def takes_s(self, repetitions: float) -> float:
        """Return the expected seconds."""
        return self.once_s + self.fixed_s * repetitions

    @property
    def extra_s(self) -> float:
        """Return the expected seconds of all repetitions above the least."""
        return self.fixed_s * (self.full - self.least)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allotment:
    """The repetitions that a part may make, and the seconds it may take if a repetition's length is unknown."""

    repetitions: int
    seconds: float = math.inf


class Budget:
    """Gives each part its full repetitions where the time suffices for all.

    Else each gets the same number of seconds for repetitions above the least, and a short one no more than it needs: so
    short measurements are repeated as often as ever, and long ones, which average over more by themselves, less often.
    What was measured so far corrects what is expected of the rest: it takes longer where other work is going on.

    Args:
        parts: in their order.
        left_s: for all of them.
        clock: seconds.
    """

    def __init__(self, parts: Sequence[Part], left_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rest = list(parts)
        self._clock = clock
        self._ends = clock() + left_s
        self._expected_s, self._took_s = 0.0, 0.0

    def skip(self) -> None:
        """Leave out the next part, which was measured before."""
        self._rest.pop(0)

    def allot(self) -> Allotment:
        """Return what the next part may take."""
        part, extra_s = self._rest[0], self._extra_s()
        if self._pace * part.extra_s <= extra_s:
            repetitions = part.full
        else:
            repetitions = part.least + int(extra_s / (self._pace * part.fixed_s))
        return Allotment(repetitions=repetitions, seconds=self._pace * part.takes_s(part.least) + extra_s)

    @property
    def left_s(self) -> float:
        """Return the seconds that the rest is expected to take."""
        extra_s, pace = self._extra_s(), self._pace
        return sum(pace * part.takes_s(part.least) + min(extra_s, pace * part.extra_s) for part in self._rest)

    def made(self, repetitions: int, seconds: float) -> None:
        """Note what the next part took, which is then over."""
        self._expected_s += self._rest.pop(0).takes_s(repetitions)
        self._took_s += seconds

    def _extra_s(self) -> float:
        """The seconds that each part may take for repetitions above the least."""
        slack_s = self._ends - self._clock() - self._pace * sum(part.takes_s(part.least) for part in self._rest)
        wanted = sorted(self._pace * part.extra_s for part in self._rest)
        for index, seconds in enumerate(wanted):
            if seconds > (equal_s := slack_s / (len(wanted) - index)):
                return max(0.0, equal_s)
            slack_s -= seconds
        return math.inf

    @property
    def _pace(self) -> float:
        """Seconds that parts took / seconds that were expected; 1 before much was measured."""
        return (self._took_s + PRIOR_S) / (self._expected_s + PRIOR_S)
