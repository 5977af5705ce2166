"""Ranks that compute on the same cores: when each gets how far, wherever each began.

While ranks compute whose shares of the time add up to a load, each gets share / slowdown(load) of what it would do by
itself; one that waits for messages takes nothing. With one share, and all beginning at once, that is `crowd_at`.

Source: processor sharing, Kleinrock, "Queueing systems", volume 2 (1976), section 4.4.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from bench.core.parts import Calibration
from bench.costs.arrays import Floats
from bench.costs.ranks.crowds import crowd_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedCores:
    """Cores, and the ranks on them.

    Attributes:
        calibration: says how ranks slow each other down.
        shares: of the time in which each rank's host runs, float [ranks].
        load: of one rank that always runs: its threads / cores.
    """

    calibration: Calibration
    shares: Floats
    load: float

    def reached(self, starts: Floats, marks: Floats) -> Floats:
        """When ranks come to marks of their work, float [marks, ranks].

        Args:
            starts: when each begins, float [ranks].
            marks: seconds of work until each, alone on the machine, ascending.
        """
        times = np.empty((len(marks), len(starts)))
        done, passed = np.zeros(len(starts)), np.zeros(len(starts), dtype=int)
        now = float(starts.min())
        while (passed < len(marks)).any():
            computes = (starts <= now) & (passed < len(marks))
            rates = self.rates(computes)
            at_mark = np.full(len(starts), np.inf)
            at_mark[computes] = now + np.maximum(0.0, marks[passed[computes]] - done[computes]) / rates[computes]
            event = min(float(at_mark.min()), float(starts[starts > now].min(initial=np.inf)))
            done += rates * (event - now)
            now = event
            there = np.flatnonzero(at_mark <= now)
            times[passed[there], there] = now
            passed[there] += 1
        return times

    def rates(self, computes: npt.NDArray[np.bool_]) -> Floats:
        """How much of its work each gets done in a second, beside what it would alone, float [ranks].

        Args:
            computes: who is at it, bool [ranks]; 0 for the others.
        """
        load = self.load * float(self.shares[computes].sum())
        slowdown = crowd_at(self.calibration, load).computed_s / self.calibration.computed_s
        rates: Floats = np.where(computes, self.shares, 0.0) / slowdown
        return rates
