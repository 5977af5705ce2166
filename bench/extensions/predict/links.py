"""Links of hosts that are connected by one switch: rates, rates that change over time, and TCP windows after silence.

A link whose rate changes over time is modelled as a link of its mean rate with its own clock. A trace has n
opportunities to send in a period T. At time t its clock shows

    clock(t) = (opportunities before t) T / n

So the clock's speed is the current rate / the mean rate, and a transfer that takes s seconds at the mean rate ends when
the clock has advanced by s. A queue that is served in order uses every opportunity while something waits, so the
formulas for queues (`flows.drained`) also hold on this clock. Both conversions between time and clock are
non-decreasing, and additional opportunities never make anything end later.

Source: Netravali et al. 2015 (Mahimahi, USENIX ATC), section 4: an opportunity is lost if nothing waits, and the trace
starts again after its last line.

TCP windows determine how long a message takes on a connection that was silent before. A window grows by the bytes that
are sent while the window is full, up to twice the bytes that are under way at once. So it reaches the length of a
message if this is the connection's only message in the step, or twice this length if other messages follow. For every
timeout (0.2 s plus a round trip) that the silence lasts, the window is halved, but not below ten segments. The window
then doubles in every round trip. With a first window of w bytes, a message of b bytes, rate c and round-trip time r,
the message

    leaves in  max(w/c, r) + max(2w/c, r) + ... + (bytes left) / c

Connections are silent while their ranks compute (`Windows`), and also within a step while a sum continues between other
ranks: a leaf of a tree sends to its parent, and does not send again until its next sum (`SettlingWindows`).

A longer delay means fewer timeouts, and so could make a message leave sooner. To exclude this, the model takes the
longest time that this delay or any shorter delay gives. The length of a silence within a step is the sum of the
durations of the waves that passed in it. A wave lasts as long as its slowest message and its busiest link at mean
rates. This includes messages for which other ranks do not wait, and leaves out the time that ranks compute between
waves. So a faster link, a shorter delay or a shorter silence never makes a message later, which the actual time between
two messages would not guarantee.

Sources: Handley, Padhye, Floyd 2000 (RFC 2861), section 3.2, as implemented in Linux: `tcp_cwnd_restart`, and
`is_cwnd_limited` for the bytes under way; Chu et al. 2013 (RFC 6928); Paxson et al. 2011 (RFC 6298), with Linux's
minimum of the deviation.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from collectives.schedule.waves import Ints

Floats = npt.NDArray[np.float64]

# Times that differ by at most this count as equal, so that despite rounding a message can use the opportunity to send
# at the moment when the message arrives.
_INSTANT_S = 1e-9
# Remaining work below this share of an opportunity counts as a rounding error and needs no further opportunity.
_PART = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class TraceClock:
    """The clock of a link whose rate follows a trace; its speed is the current rate / the mean rate.

    Attributes:
        moments_s: times in seconds at which the trace gives an opportunity to send, ascending, float [opportunities].
            The last time is above 0, and is the period after which the trace repeats.
    """

    moments_s: Floats

    def clock_at(self, times: Floats) -> Floats:
        """Return the clock's reading just before each time, without an opportunity to send at exactly this time."""
        times, period_s = times - _INSTANT_S, self.moments_s[-1]
        rounds = np.maximum(0.0, np.ceil(times / period_s) - 1)  # a time at the end of a period belongs to this period
        passed = np.searchsorted(self.moments_s, times - rounds * period_s)
        shown: Floats = rounds * period_s + passed * (period_s / len(self.moments_s))
        return shown

    def time_of(self, clock: Floats) -> Floats:
        """Return the time of the opportunity to send at which the clock reaches each reading."""
        number, period_s = len(self.moments_s), self.moments_s[-1]
        index = np.maximum(0.0, np.ceil(clock * (number / period_s) - _PART) - 1)
        rounds, within = np.divmod(index, number)
        moments: Floats = rounds * period_s + self.moments_s[within.astype(np.int64)]
        return moments


class Paces:
    """The clocks of all hosts' links in one direction; a clock's speed is the link's current rate / its mean rate.

    Args:
        of_hosts: the clock of each host's link; None for a link whose rate is constant, because its clock shows the
            time. Empty if all rates are constant.
    """

    def __init__(self, of_hosts: Sequence[TraceClock | None]) -> None:
        self._paces = [pace for pace in dict.fromkeys(of_hosts) if pace is not None]
        self._of_host = np.array([-1 if pace is None else self._paces.index(pace) for pace in of_hosts], dtype=np.int64)
        self._all_equal = set(of_hosts) == set(self._paces[:1])

    def clock_at(self, hosts: Ints, times: Floats) -> Floats:
        """Return the readings of these hosts' clocks at given times, float [..., hosts].

        Args:
            hosts: indices of the hosts, int [hosts].
            times: seconds, float [..., hosts], or [..., 1] for the same times on all hosts.
        """
        return self._converted(hosts, times, TraceClock.clock_at)

    def time_of(self, hosts: Ints, clock: Floats) -> Floats:
        """Return the times at which these hosts' clocks reach the readings, float [..., hosts]."""
        return self._converted(hosts, clock, TraceClock.time_of)

    def _converted(self, hosts: Ints, values: Floats, convert: Callable[[TraceClock, Floats], Floats]) -> Floats:
        if not self._paces:
            return values
        if self._all_equal:
            return convert(self._paces[0], values)
        found = np.broadcast_to(values, (*values.shape[:-1], len(hosts))).copy()
        for index, pace in enumerate(self._paces):
            here = np.flatnonzero(self._of_host[hosts] == index)
            found[..., here] = convert(pace, found[..., here])
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """The links between the ranks, and the cost of messages on them.

    Attributes:
        host_of: the index of each rank's host, int [ranks]; messages within a host use no link.
        up_rate: bytes per second that each host can send, float [hosts]; inf if not limited; the mean rate if the rate
            changes over time.
        down_rate: bytes per second that each host can receive, float [hosts]; inf or the mean rate as in `up_rate`.
        up_paces, down_paces: the clock of each host's link in each direction, whose speed is the current rate / the
            mean rate; None for a host whose rate is constant. Empty if all rates are constant.
        latency_s: one-way delay of the messages that each host sends, in seconds, float [hosts].
        message_s: CPU seconds of a rank for each message that it sends or receives.
        per_byte_s: CPU seconds of a rank for each byte that it sends or receives.
        wake_s: seconds from the arrival of a message until the rank that waits for it continues.
        crowded_wake_s: `wake_s` while more threads compute than there are cores.
        ack_share: bytes of acknowledgements that travel in one direction per byte of messages in the other direction.
        carry_byte_s: CPU seconds per byte if cores carry messages between virtual hosts; 0 if no cores do.
        carriers: number of cores that carry messages at once.
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

    @functools.cached_property
    def one_per_host(self) -> bool:
        """True if every rank has its own host."""
        return np.array_equal(self.host_of, np.arange(len(self.up_rate)))

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks on all hosts."""
        return len(self.host_of)

    @property
    def period_s(self) -> float | None:
        """Return the longest period of the traces in seconds; None if all rates are constant."""
        paces = filter(None, (*self.up_paces, *self.down_paces))
        return max((float(pace.moments_s[-1]) for pace in paces), default=None)


# Linux's minimum retransmission timeout in seconds, without the round trip.
LEAST_TIMEOUT_S = 0.2
SEGMENT_BYTES = 1448
LEAST_WINDOW_BYTES = 10 * SEGMENT_BYTES
# Seconds of silence after which a window is as small as the window of a new connection.
NEW_S = 60.0
# Seconds by which a silence must exceed a timeout, because sums of times have rounding errors.
TIE_S = 1e-6


class Windows:
    """TCP windows of all connections between ranks; assumes that connections are idle only between steps.

    Args:
        num_ranks: number of ranks; every two ranks are connected.
    """

    def __init__(self, num_ranks: int) -> None:
        self._silence_s = 0.0
        # Bytes of the longest message, and of all messages, that each connection has carried in the step.
        self._longest, self._sent = np.zeros((2, num_ranks, num_ranks), dtype=np.float32)
        self._is_grown = np.zeros((num_ranks, num_ranks), dtype=np.bool_)

    def begin_step(self, silence_s: float) -> None:
        """Begin a step after `silence_s` seconds in which no connection sent anything."""
        self._silence_s = silence_s
        self._is_grown = (self._sent > 0) & (self._sent >= 2 * self._longest)
        self._longest[:] = self._sent[:] = 0

    def leaves_in_s(
        self,
        sources: Ints,
        targets: Ints,
        nbytes: Ints,
        per_byte_s: Floats,
        round_trip_s: Floats,
    ) -> Floats:
        """Return the seconds that each message takes to leave its sender if the links carry nothing else.

        All arguments are broadcast to one shape, which is also the shape of the result.

        Args:
            sources: sending rank of each message.
            targets: receiving rank of each message.
            nbytes: bytes of each message.
            per_byte_s: seconds per byte on the slowest link of each message's path.
            round_trip_s: round-trip time of each message's path, in seconds.
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
            if (window == sent).all():  # further timeouts shrink no window and assume shorter delays
                break
        return leaves

    def _before(self, sources: Ints, targets: Ints, nbytes: Ints) -> tuple[Floats, Floats]:
        """Return the seconds of silence, and the TCP window in bytes, of each message's connection before the message.

        The silence counts from the connection's last long message. The window is the connection's longest message since
        its last silence.
        """
        return np.asarray(self._silence_s), self._longest[sources, targets].astype(np.float64)

    def end_wave(self, sources: Ints, targets: Ints, seconds: float) -> None:
        """Record that messages have arrived; does nothing here, because connections are not silent within a step.

        Args:
            sources: sending rank of each message.
            targets: receiving rank of each message.
            seconds: seconds from the start of the first of these messages until the last of them arrived.
        """


class SettlingWindows(Windows):
    """TCP windows of connections that are silent within steps too, from the first step on.

    Steps are simulated until these windows no longer change from step to step.

    Silences add up until a message is at least half as long as the longest message of the previous step, because such a
    message lets the window grow again.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._clock_s = NEW_S
        # For each connection: reading of `_clock_s` at the last message, seconds of silence since a long message,
        # window in bytes.
        self._came_at_s, self._silences_s, self._window = np.zeros((3, num_ranks, num_ranks))
        self._longest_before = np.full((num_ranks, num_ranks), np.inf)

    @override
    def begin_step(self, silence_s: float) -> None:
        if self._longest.any():
            self._longest_before = self._longest.astype(np.float64)
        super().begin_step(silence_s)
        self._clock_s += silence_s

    @override
    def _before(self, sources: Ints, targets: Ints, nbytes: Ints) -> tuple[Floats, Floats]:
        silence_s = self._clock_s - self._came_at_s[sources, targets]
        is_silent = silence_s > LEAST_TIMEOUT_S + TIE_S
        silences_s = self._silences_s[sources, targets] + is_silent * silence_s
        window = np.where(is_silent, 0.0, self._window[sources, targets])
        self._silences_s[sources, targets] = np.where(
            2 * nbytes >= self._longest_before[sources, targets], 0.0, silences_s
        )
        self._window[sources, targets] = np.maximum(window, nbytes)
        return silences_s, window

    @override
    def end_wave(self, sources: Ints, targets: Ints, seconds: float) -> None:
        self._clock_s += seconds
        self._came_at_s[sources, targets] = self._clock_s


def _leaves_in_s(window: Floats, nbytes: Ints, per_byte_s: Floats, round_trip_s: Floats) -> Floats:
    left = nbytes.astype(np.float64)
    seconds = np.zeros(np.broadcast_shapes(left.shape, per_byte_s.shape))
    while (waits := left > window).any():
        seconds += np.where(waits, np.maximum(window * per_byte_s, round_trip_s), 0.0)
        left, window = np.where(waits, left - window, left), np.where(waits, 2 * window, window)
    return seconds + left * per_byte_s
