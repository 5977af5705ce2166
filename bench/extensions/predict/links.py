"""Links of hosts, which meet in one switch: rates, rates that change over time, and TCP's windows after a silence.

A link whose rate changes over time is one of its mean rate with a clock of its own. A trace has n opportunities in a
period T. By time t its clock has come to

    clock(t) = (opportunities before t) T / n

so the clock runs as fast as the rate is over its mean, and what a link of the mean rate would do in s seconds is done
when the clock has advanced by s. A queue that is worked off in order never wastes an opportunity while something waits,
so queues hold on that clock as they do on any other (`flows.drained`). Both ways between time and clock never
fall, and more opportunities never end anything later.

Source: Netravali et al. 2015 (Mahimahi, USENIX ATC), section 4: what finds nothing to carry is lost, and the trace
begins anew after its last line.

TCP's windows say how long a message takes on a connection that was silent before. A window grows by what is sent while
it is full, to twice what is under way at once: to the length of a message that is the only one of its step, and to
twice that where others follow on the same connection. After every timeout of silence, 0.2 s and a round trip, a
connection may send half as much at once as before, and no less than ten segments; then twice as much in every round
trip. With w bytes at first, b in all, at rate c and a round trip of r,

    leaves in  max(w/c, r) + max(2w/c, r) + ... + what is left / c

Connections are silent while their ranks compute (`Windows`), and within a step while a sum goes on elsewhere: a tree's
leaf sends up, and then not until its next sum (`SettlingWindows`).

A longer delay means fewer timeouts, and so could make a message leave sooner: what counts is the longest of this delay
and all shorter ones. A silence within a step is that of the whole waves that passed meanwhile, each as long as its
slowest message and its busiest link at mean rates: what others do not wait for is too much in it, and what ranks
compute between waves is missing. So no faster link and no shorter delay or silence makes a message later, which the
time between two messages itself would not promise.

Sources: Handley, Padhye, Floyd 2000 (RFC 2861), section 3.2, as Linux does in `tcp_cwnd_restart`, and `is_cwnd_limited`
for what is under way; Chu et al. 2013 (RFC 6928); Paxson et al. 2011 (RFC 6298), with Linux's least deviation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from collectives.schedule.waves import Ints

Floats = npt.NDArray[np.float64]


# Times no further apart count as one, so that a message that comes at an opportunity can use it despite rounding.
_INSTANT_S = 1e-9
# Share of an opportunity that need not be waited for.
_PART = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class TraceClock:
    """One trace.

    Attributes:
        moments_s: of its opportunities, ascending, float [opportunities]; the last is the period, above 0.
    """

    moments_s: Floats

    @property
    def period_s(self) -> float:
        """Return the seconds after which rates begin anew."""
        return float(self.moments_s[-1])

    def clock_at(self, times: Floats) -> Floats:
        """Return what its clock shows just before these times; an opportunity at the very time is still to come."""
        times = times - _INSTANT_S
        rounds = np.maximum(0.0, np.ceil(times / self.period_s) - 1)  # what lies on a period's end belongs to it
        passed = np.searchsorted(self.moments_s, times - rounds * self.period_s)
        shown: Floats = rounds * self.period_s + passed * (self.period_s / len(self.moments_s))
        return shown

    def time_of(self, clock: Floats) -> Floats:
        """Return the moment of the opportunity with which its clock comes to these readings."""
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
        """Return what the clocks of these hosts show at these times, float [..., hosts] or [..., 1]."""
        return self._of_each(hosts, times, TraceClock.clock_at)

    def time_of(self, hosts: Ints, clock: Floats) -> Floats:
        """Return when the clocks of these hosts come to these readings, float [..., hosts]."""
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the ranks, and the cost of messages on them.

    Attributes:
        host_of: of each rank, int [ranks]; messages within a host take no link.
        up_rate: bytes per second that each host can send, float [hosts]; inf: not limited.
        down_rate: that it can receive, float [hosts]; inf: not limited.
        up_paces, down_paces: where these are the means of rates that change over time, each host's, or None where its
            own is constant; empty: all are.
        latency_s: one-way delay of what it sends, float [hosts].
        message_s: what a rank does for one message, sent or received.
        per_byte_s: what it does for one byte, sent or received.
        wake_s: until a rank that waits for a message does something about it.
        crowded_wake_s: the same while more threads compute than there are cores.
        ack_share: of the time that a byte takes of a link, what its acknowledgement takes of the way back.
        carry_byte_s: CPU time of a byte where cores carry all links, those of virtual hosts; 0: none do.
        carriers: cores that do so at once.
    """

    host_of: Ints
    up_rate: Floats
    down_rate: Floats
    latency_s: Floats
    message_s: float = 0.0
    per_byte_s: float = 0.0
    wake_s: float = 0.0
    crowded_wake_s: float = 0.0
    ack_share: float = 0.0
    carry_byte_s: float = 0.0
    carriers: int = 1
    up_paces: Sequence[TraceClock | None] = ()
    down_paces: Sequence[TraceClock | None] = ()

    @classmethod
    def of_hosts(cls, up_rate: Floats, down_rate: Floats, latency_s: Floats, **more: Any) -> Self:
        """Return links of one rank per host; `more` are other fields by name."""
        hosts = np.arange(len(up_rate))
        return cls(host_of=hosts, up_rate=up_rate, down_rate=down_rate, latency_s=latency_s, **more)

    @property
    def one_per_host(self) -> bool:
        """Tell whether no two ranks share a host."""
        return np.array_equal(self.host_of, np.arange(len(self.up_rate)))

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks on all hosts."""
        return len(self.host_of)

    @property
    def period_s(self) -> float | None:
        """Return the seconds after which rates begin anew."""
        return max((pace.period_s for pace in (*self.up_paces, *self.down_paces) if pace), default=None)


# Linux's least timeout, beside the round trip.
LEAST_TIMEOUT_S = 0.2
SEGMENT_BYTES = 1448
LEAST_WINDOW_BYTES = 10 * SEGMENT_BYTES
# Seconds of silence after which windows are as small as those of new connections.
NEW_S = 60.0
# A silence must be longer than a timeout by this, because times are rounded when they are added up.
TIE_S = 1e-6


class Windows:
    """TCP's windows of all connections between ranks, which are silent only between steps.

    Args:
        num_ranks: that are connected.
    """

    def __init__(self, num_ranks: int) -> None:
        self._silence_s = 0.0
        self._longest = np.zeros((num_ranks, num_ranks), dtype=np.float32)
        self._sent = np.zeros((num_ranks, num_ranks), dtype=np.float32)  # of all messages of the step
        self._is_grown = np.zeros((num_ranks, num_ranks), dtype=np.bool_)

    def begin_step(self, silence_s: float) -> None:
        """Begin a step after so many seconds in which nothing was sent."""
        self._silence_s = silence_s
        self._is_grown = (self._sent > 0) & (self._sent >= 2 * self._longest)
        self._longest[:] = self._sent[:] = 0

    def leaves_in_s(
        self,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        nbytes: Ints,
        per_byte_s: Floats,
        round_trip_s: Floats,
    ) -> Floats:
        """Return the seconds in which messages leave that have their links to themselves; all arguments broadcast.

        Args:
            sources: ranks that send.
            targets: to which.
            nbytes: of each message.
            per_byte_s: of the slowest link on its way.
            round_trip_s: of that.
        """
        silence_s, sent = self._before(sources, targets, nbytes)
        sent = np.maximum(LEAST_WINDOW_BYTES, sent)
        self._longest[sources, targets] = np.maximum(self._longest[sources, targets], nbytes)
        self._sent[sources, targets] += nbytes
        grown = (1 + self._is_grown[sources, targets]) * nbytes
        leaves: Floats = nbytes * per_byte_s
        for timeouts in range(1, 1 + int(silence_s.max(initial=0.0) / LEAST_TIMEOUT_S)):
            window = np.maximum(sent, grown * 0.5**timeouts)
            longest_s = np.clip(silence_s / timeouts - LEAST_TIMEOUT_S, 0.0, round_trip_s)
            leaves = np.maximum(leaves, _leaves_in_s(window, nbytes, per_byte_s, longest_s))
            if (window == sent).all():  # more timeouts make none smaller, and come with shorter delays
                break
        return leaves

    def _before(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], nbytes: Ints
    ) -> tuple[Floats, Floats]:
        """Return (seconds of silence since a window was as long as the message, bytes sent at once since then)."""
        return np.asarray(self._silence_s), self._longest[sources, targets].astype(np.float64)

    def end_wave(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], seconds: float) -> None:
        """Note that a wave has come that took so long.

        Args:
            sources: ranks that have sent.
            targets: to which.
            seconds: until all of it was there.
        """


class SettlingWindows(Windows):
    """TCP's windows of new connections, which are silent within steps too, until they are settled.

    Silences add up until a message is at least half as long as the longest of the step before, which lets the window
    grow again.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._clock_s = NEW_S
        self._came_at_s = np.zeros((num_ranks, num_ranks))  # by this clock
        self._silences_s = np.zeros((num_ranks, num_ranks))
        self._window = np.zeros((num_ranks, num_ranks))  # bytes
        self._longest_before = np.full((num_ranks, num_ranks), np.inf)

    @override
    def begin_step(self, silence_s: float) -> None:
        if self._longest.any():
            self._longest_before = self._longest.astype(np.float64)
        super().begin_step(silence_s)
        self._clock_s += silence_s

    @override
    def _before(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], nbytes: Ints
    ) -> tuple[Floats, Floats]:
        silence_s = self._clock_s - self._came_at_s[sources, targets]
        is_silent = silence_s > LEAST_TIMEOUT_S + TIE_S
        silences_s = self._silences_s[sources, targets] + is_silent * silence_s
        window = np.where(is_silent, 0.0, self._window[sources, targets])
        is_long = 2 * nbytes >= self._longest_before[sources, targets]
        self._silences_s[sources, targets] = np.where(is_long, 0.0, silences_s)
        self._window[sources, targets] = np.maximum(window, nbytes)
        return silences_s, window

    @override
    def end_wave(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], seconds: float) -> None:
        self._clock_s += seconds
        self._came_at_s[sources, targets] = self._clock_s


def _leaves_in_s(window: Floats, nbytes: Ints, per_byte_s: Floats, round_trip_s: Floats) -> Floats:
    left = nbytes.astype(np.float64)
    seconds = np.zeros(np.broadcast_shapes(left.shape, per_byte_s.shape))
    while (waits := left > window).any():
        seconds += np.where(waits, np.maximum(window * per_byte_s, round_trip_s), 0.0)
        left, window = np.where(waits, left - window, left), np.where(waits, 2 * window, window)
    leaves: Floats = seconds + left * per_byte_s
    return leaves
