"""Links whose rate changes over time: each is one of its mean rate with a clock of its own.

A trace has n opportunities in a period T. By time t its clock has come to

    clock(t) = (opportunities before t) T / n

so the clock runs as fast as the rate is over its mean, and what a link of the mean rate would do in s seconds is done
when the clock has advanced by s. A queue that is worked off in order never wastes an opportunity while something waits,
so queues hold on that clock as they do on any other (`queues.py`). Both ways between time and clock never
fall, and more opportunities never end anything later.

Source: Netravali et al. 2015 (Mahimahi, USENIX ATC), section 4: what finds nothing to carry is lost, and the trace
begins anew after its last line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from bench.extensions.predict.arrays import Floats
from collectives.schedule.waves import Ints

_INSTANT_S = 1e-9
"""Times no further apart are one, so that what comes at an opportunity can use it, however times were added up."""
_PART = 1e-6
"""of an opportunity, which need not be waited for"""


@dataclasses.dataclass(frozen=True, eq=False)
class TraceClock:
    """One trace.

    Attributes:
        moments_s: of its opportunities, ascending, float [opportunities]; the last is the period, above 0.
    """

    moments_s: Floats

    @property
    def period_s(self) -> float:
        """After which it begins anew."""
        return float(self.moments_s[-1])

    def clock_at(self, times: Floats) -> Floats:
        """What its clock shows just before these times; an opportunity at the very time is still to come."""
        times = times - _INSTANT_S
        rounds = np.maximum(0.0, np.ceil(times / self.period_s) - 1)  # what lies on a period's end belongs to it
        passed = np.searchsorted(self.moments_s, times - rounds * self.period_s)
        shown: Floats = rounds * self.period_s + passed * (self.period_s / len(self.moments_s))
        return shown

    def time_of(self, clock: Floats) -> Floats:
        """The moment of the opportunity with which its clock comes to these readings."""
        number = len(self.moments_s)
        index = np.maximum(0.0, np.ceil(clock * (number / self.period_s) - _PART) - 1)
        rounds, within = np.divmod(index, number)
        moments: Floats = rounds * self.period_s + self.moments_s[within.astype(np.int64)]
        return moments


class Paces:
    """One direction of every host's link.

    Args:
        of_hosts: each one's, None where the rate is constant and the clock shows the time; empty: everywhere.
    """

    def __init__(self, of_hosts: Sequence[TraceClock | None]) -> None:
        self._paces = [pace for pace in dict.fromkeys(of_hosts) if pace is not None]
        self._of_host = np.array([-1 if pace is None else self._paces.index(pace) for pace in of_hosts], dtype=np.int64)
        self._all_alike = set(of_hosts) == set(self._paces[:1])

    def clock_at(self, hosts: Ints, times: Floats) -> Floats:
        """What the clocks of these hosts show at these times, float [..., hosts] or [..., 1]."""
        return self._of_each(hosts, times, TraceClock.clock_at)

    def time_of(self, hosts: Ints, clock: Floats) -> Floats:
        """When the clocks of these hosts come to these readings, float [..., hosts]."""
        return self._of_each(hosts, clock, TraceClock.time_of)

    def _of_each(self, hosts: Ints, values: Floats, way: Callable[[TraceClock, Floats], Floats]) -> Floats:
        if not self._paces:
            return values
        if self._all_alike:
            return way(self._paces[0], values)
        found = np.broadcast_to(values, (*values.shape[:-1], len(hosts))).copy()
        for index, pace in enumerate(self._paces):
            here = np.flatnonzero(self._of_host[hosts] == index)
            found[..., here] = way(pace, found[..., here])
        return found
