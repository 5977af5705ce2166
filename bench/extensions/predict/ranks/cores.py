"""Ranks that compute on the same cores: when each gets how far, wherever each began.

While ranks compute whose shares of the time add up to a load, each gets share / slowdown(load) of what it would do by
itself; one that waits for messages takes nothing. With one share, and all beginning at once, that is `crowd_at`.

Source: processor sharing, Kleinrock, "Queueing systems", volume 2 (1976), section 4.4.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from bench.extensions.predict.arrays import Floats
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.ranks.crowds import crowd_at
from bench.extensions.predict.sharing import FairShareQueue


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
        env, first = simpy.Environment(), float(starts.min())
        cores = FairShareQueue(env, len(starts), self.rates)
        times = np.empty((len(marks), len(starts)))

        def compute(rank: int) -> Generator[simpy.Event, Any, None]:
            yield env.timeout(starts[rank] - first)
            for number, seconds in enumerate(np.diff(marks, prepend=0.0)):
                yield cores.begin(rank, seconds)
                times[number, rank] = first + env.now

        for rank in range(len(starts)):
            env.process(compute(rank))
        env.run()
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
