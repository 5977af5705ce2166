"""Flows: the times at which a sum's messages arrive, on access links of any rates that are connected by one switch.

Each direction of a link is a fluid queue. A wave is a set of messages that depend only on messages of earlier waves.
For ranks i that are ready at R_i, and messages m of one wave with b_m bytes:

    begin(m)  = R_source + s a k                                 the source sends k messages
    up(h)     = drained(begin(m), b_m / uplink(h))               over all messages that leave host h and share its link
    down(h)   = drained(begin(m) + l_source, b_m / downlink(h))  over all messages that arrive at host h
    carried   = drained(begin(m), c b_m / carriers)              over all messages, if cores of one machine carry them
    alone(m)  = begin(m) + window(m) + l_source                  for a connection that was silent before
    arrive(m) = max(up(source) + l_source, down(target), carried, alone(m)) + w
    R_target  = max over its m of arrive(m), + s (a k + work(m)) the target receives k messages; R_source = begin(m)

a is the CPU time for one message and its bytes, s the factor by which a rank's host is slower, l the one-way delay, c
the CPU time of carrying one byte, carriers the number of cores that carry messages, and w the time to wake up a waiting
rank. window(m) is the extra time of a new or idle connection, until its congestion window is large enough
(`links.Windows`). work(m) is the work on a received payload: it is unpacked and, in some waves, merged.

`drained` (below) returns when a fluid queue becomes empty. Like the other formulas, it consists of sums and maxima of
non-negative terms only, so a faster link, a shorter delay or a smaller message never makes anything later. (Fair shares
that flows negotiate do not guarantee this.) Messages that share an uplink end at the same time, like flows of equal
weight. Acknowledgements of the messages in one direction of a link travel in the other direction. They are added to b_m
of the messages that travel in that other direction. Senders do not wait for buffer space at the receiver: once the
kernel has accepted a message, it travels while the receiver still computes.

On a link whose rate changes over time, `drained` uses the link's own clock (`links.TraceClock`), and a message consists
of parts. A part leaves when the uplink has sent everything before it. With constant rates, the first and the last part
determine when the message has arrived; with changing rates, the slowest place may be in the middle of a message.

A fluid queue that is never idle while something waits becomes empty at

    drained(t, v) = max(free + sum v, max over k of (t_(k) + v_(k) + v_(k+1) + ...)), arrivals in order of time

This is Lindley's recursion with arrival times t and service times v, for a queue that has earlier work until `free`.
The queue becomes empty at the end of its last busy period. This period begins with some arrival, and lasts for the sum
of the service times of everything that has arrived since then.
"""

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import LinearCost
from bench.extensions.predict.links import Floats, Links, Paces, Windows
from collectives.schedule.waves import Ints, Wave


def drained(queue: Ints, arrival: Floats, service: Floats, free: Floats, *, alone: bool) -> Floats:
    """Return the time at which each queue has served all messages, float [queues]; without messages, its `free`.

    Args:
        queue: index of the queue at which each message arrives, int [messages].
        arrival: arrival times of each message's equal parts, float [parts, messages].
        service: service time of each whole message, float [messages].
        free: the time from which each queue is free, float [queues].
        alone: True if no queue receives two messages.
    """
    parts = len(arrival)
    ends = free.copy()
    if alone:
        begin = arrival[0] if parts == 1 else (arrival - service * (np.arange(parts)[:, None] / parts)).max(0)
        ends[queue] = np.maximum(free[queue], begin) + service
        return ends
    queue, arrival, service = np.tile(queue, parts), arrival.ravel(), np.tile(service / parts, parts)
    count = np.bincount(queue, minlength=len(free))
    order = np.lexsort((arrival, queue))
    queue, arrival, service = queue[order], arrival[order], service[order]
    used = np.flatnonzero(count)
    firsts = np.concatenate([[0], np.cumsum(count[used])[:-1]])
    totals = np.add.reduceat(service, firsts)
    before = np.cumsum(service) - service
    rest = np.repeat(totals + before[firsts], count[used]) - before
    ends[used] = np.maximum(np.maximum.reduceat(arrival + rest, firsts), free[used] + totals)
    return ends


class WavePaths:
    """The links that the messages of a wave (messages that depend only on earlier waves) use.

    One object serves several waves, because waves between the same ranks often repeat.

    Args:
        sources, targets: sending and receiving rank of each message, int [messages].
        links: the links between the ranks.

    Attributes:
        alone: True if every rank sends and receives at most one message, and no two ranks share a host.
        inside: True for each message that stays within a host, bool [messages]; None if no message does.
        leaving, coming: number of messages that each rank sends, and number that it receives, float [ranks].
        from_hosts, to_hosts: hosts of each message's source and target, int [messages].
        latency_s: one-way delay of each message, 0 within a host, float [messages].
        round_trip_s: delay to the target and back, 0 within a host, float [messages].
        up_s, down_s: seconds per byte on each message's uplink and downlink, float [messages].
    """

    def __init__(self, sources: Ints, targets: Ints, links: Links) -> None:
        n = links.num_ranks
        self.num_hosts = len(links.up_rate)
        self.sources, self.targets = sources, targets
        self.leaving, self.coming = (np.bincount(ranks, minlength=n).astype(float) for ranks in (sources, targets))
        self.from_hosts, self.to_hosts = links.host_of[sources], links.host_of[targets]
        self.alone = links.one_per_host and self.leaving.max() == self.coming.max() == 1
        self.inside = None if links.one_per_host else self.from_hosts == self.to_hosts
        latency_s = links.latency_s[self.from_hosts]
        self.latency_s = latency_s if self.inside is None else np.where(self.inside, 0.0, latency_s)
        round_trip_s = latency_s + links.latency_s[self.to_hosts]
        self.round_trip_s = round_trip_s if self.inside is None else np.where(self.inside, 0.0, round_trip_s)
        self.up_s, self.down_s = 1 / links.up_rate[self.from_hosts], 1 / links.down_rate[self.to_hosts]

    def with_acknowledgements(self, nbytes: Ints, share: float) -> tuple[Floats, Floats]:
        """Return the bytes that each message adds to its uplink and to its downlink, float [messages] each.

        Both numbers include a part of the acknowledgements of the messages in the opposite direction.

        Args:
            nbytes: bytes of each message, int [messages].
            share: bytes of acknowledgements per byte of messages, 0 to 1.
        """
        if not share:
            return nbytes.astype(float), nbytes.astype(float)
        hosts = self.num_hosts
        leaving, coming = (np.bincount(ends, nbytes, hosts) for ends in (self.from_hosts, self.to_hosts))
        num_leaving, num_coming = (np.bincount(ends, minlength=hosts) for ends in (self.from_hosts, self.to_hosts))
        up = nbytes + share * (coming / np.maximum(1, num_leaving))[self.from_hosts]
        down = nbytes + share * (leaving / np.maximum(1, num_coming))[self.to_hosts]
        return up, down


# Number of targets that are computed at once in a wave from every rank to every rank, which limits memory.
TARGETS_AT_ONCE = 256
# Most messages of one wave from every rank to every rank; this many messages take a few GB of memory.
MOST_MESSAGES = 1 << 28
# Most parts into which a message is divided if rates change over time.
MOST_PARTS = 16
LEAST_PART_BYTES = 1500

NOTHING = LinearCost()


class Flows:
    """Simulate the messages of a collective's sums on links, one sum after the other.

    Args:
        links: the links between the ranks.
        slower: factor on the time that each rank needs for messages, float [ranks] or one number for all.

    Attributes:
        ready: the time in seconds at which each rank has finished its work so far, float [ranks]; set to a later time
            to let a rank wait or do other work.
        busy_s: CPU seconds of each rank for messages, without the factor `slower`, float [ranks].
        sent: bytes that each rank has sent, float [ranks].
        sent_over_links: bytes that each rank has sent to other hosts, float [ranks].
        messages: number of messages that each rank has sent, float [ranks].
        windows: TCP windows of connections that are silent at times; None if only the links limit how fast ranks send.
        crowded_until: the time until which the cores that ranks share are busy, so that waiting ranks wake up late.
    """

    def __init__(self, links: Links, slower: Floats | float = 1.0) -> None:
        self.links = links
        self._slower = slower
        self.ready = np.zeros(links.num_ranks)
        self.busy_s, self.sent, self.sent_over_links, self.messages = np.zeros((4, links.num_ranks))
        self.windows: Windows | None = None
        self.crowded_until = -math.inf
        self._hosts = np.arange(len(links.up_rate))
        self._up, self._down = Paces(links.up_paces), Paces(links.down_paces)
        self._constant = links.period_s is None
        self._up_free, self._down_free = np.zeros((2, len(self._hosts)))  # clock readings when links become free
        self._carried = 0.0
        self._paths: WavePaths | None = None

    def run(self, waves: Iterable[Wave], *, unpack: LinearCost = NOTHING, merge: LinearCost = NOTHING) -> None:
        """Simulate one sum, which begins on each rank at its time in `ready`; set `ready` to the end of the sum.

        Args:
            waves: the messages of all ranks; the messages of a wave depend only on messages of earlier waves.
            unpack: cost of unpacking each received message.
            merge: cost of adding a received message to the receiver's own values.

        Raises:
            UsageError: a wave has more than `MOST_MESSAGES` messages.
        """
        for wave in waves:
            if wave.each_to_each and len(wave.sources) * len(wave.targets) > MOST_MESSAGES:
                raise UsageError(
                    f"{len(wave.sources)} ranks that send to {len(wave.targets)} each have more messages than can be "
                    "simulated at once; choose fewer ranks"
                )
            added = np.asarray(wave.merged, dtype=np.float64)
            message_s = self.links.message_s + unpack.fixed_s + merge.fixed_s * added
            per_byte_s = self.links.per_byte_s + unpack.per_byte_s + merge.per_byte_s * added
            if wave.each_to_each and self.links.one_per_host:
                self._run_each_to_each(wave, message_s, per_byte_s)
            else:
                self._run_messages(*wave.messages(), message_s, per_byte_s)

    def _run_messages(self, sources: Ints, targets: Ints, nbytes: Ints, message_s: Floats, per_byte_s: Floats) -> None:
        """Simulate messages; receiving one takes `message_s` CPU seconds, and `per_byte_s` more for each byte."""
        message_s, per_byte_s = np.broadcast_to(message_s, nbytes.shape), np.broadcast_to(per_byte_s, nbytes.shape)
        if not nbytes.all():
            there = nbytes > 0
            sources, targets, nbytes = sources[there], targets[there], nbytes[there]
            message_s, per_byte_s = message_s[there], per_byte_s[there]
        if not len(nbytes):
            return
        if self._paths is None or self._paths.sources is not sources or self._paths.targets is not targets:
            self._paths = WavePaths(sources, targets, self.links)
        paths = self._paths
        leaving_bytes = np.bincount(sources, nbytes, len(paths.leaving)).astype(float, copy=False)
        send_s = self.links.message_s * paths.leaving + self.links.per_byte_s * leaving_bytes
        receive_s = np.bincount(targets, message_s + per_byte_s * nbytes, len(paths.coming))
        self.ready = self.ready + self._slower * send_s
        begin = self.ready[sources]
        over_link, over_link_bytes = nbytes, leaving_bytes
        if paths.inside is not None:
            over_link = np.where(paths.inside, 0, nbytes)
            over_link_bytes = np.bincount(sources, over_link, len(paths.leaving)).astype(float, copy=False)
        up_bytes, down_bytes = paths.with_acknowledgements(over_link, self.links.ack_share)
        leaves = self._up.clock_at(paths.from_hosts, begin)
        first = np.maximum(self._up_free[paths.from_hosts], leaves)
        self._up_free = drained(paths.from_hosts, leaves[None], up_bytes * paths.up_s, self._up_free, alone=paths.alone)
        up = self._up.time_of(self._hosts, self._up_free)
        parts = self._parts_leave(paths.from_hosts, begin, first, self._up_free[paths.from_hosts], over_link)
        parts = parts + paths.latency_s
        comes = self._down.clock_at(paths.to_hosts, parts)
        self._down_free = drained(paths.to_hosts, comes, down_bytes * paths.down_s, self._down_free, alone=paths.alone)
        down = self._down.time_of(self._hosts, self._down_free)
        arrive = np.maximum(parts[0], np.maximum(up[paths.from_hosts] + paths.latency_s, down[paths.to_hosts]))
        arrive = np.maximum(arrive, self._carry(begin.min(), over_link.sum()))
        if self.windows is not None:
            leaves_in_s = self.windows.leaves_in_s(
                sources, targets, over_link, np.maximum(paths.up_s, paths.down_s), paths.round_trip_s
            )
            arrive = np.maximum(arrive, begin + leaves_in_s + paths.latency_s)
            # Seconds until all these messages have left: those of the busiest link or of the slowest message.
            up_s = np.bincount(paths.from_hosts, up_bytes * paths.up_s).max()
            down_s = np.bincount(paths.to_hosts, down_bytes * paths.down_s).max()
            leave_s = float(max(up_s, down_s, leaves_in_s.max()))
            self.windows.end_wave(sources, targets, leave_s + paths.latency_s.max() + self.links.wake_s)
        arrive = self._woken(arrive)
        if paths.alone:
            self.ready[targets] = np.maximum(self.ready[targets], arrive)
        else:
            np.maximum.at(self.ready, targets, arrive)
        self.ready += self._slower * receive_s
        self.busy_s += send_s + receive_s
        self.messages += paths.leaving
        self.sent += leaving_bytes
        self.sent_over_links += over_link_bytes

    def _run_each_to_each(self, wave: Wave, message_s: Floats, per_byte_s: Floats) -> None:
        links, (sources, targets) = self.links, (wave.sources, wave.targets)
        nbytes = np.where(sources[:, None] == targets, 0, wave.nbytes)
        others = np.count_nonzero(sources[:, None] != targets, axis=1), np.count_nonzero(sources[:, None] != targets, 0)
        leaving, coming, leaving_bytes, coming_bytes = (np.zeros(links.num_ranks) for _ in range(4))
        leaving[sources], coming[targets] = others
        leaving_bytes[sources], coming_bytes[targets] = nbytes.sum(1), nbytes.sum(0)
        send_s = links.message_s * leaving + links.per_byte_s * leaving_bytes
        receive_s = message_s * coming + per_byte_s * coming_bytes
        self.ready = self.ready + self._slower * send_s
        begin = self.ready[sources]
        up_bytes = leaving_bytes + links.ack_share * coming_bytes
        self._up_free = self._up_free.copy()
        first = np.maximum(self._up_free[sources], self._up.clock_at(sources, begin))
        self._up_free[sources] = last = first + (up_bytes / links.up_rate)[sources]
        carried = self._carry(begin.min(), nbytes.sum())
        latency = links.latency_s[sources]
        parts = self._parts_leave(sources, begin, first, last, nbytes) + latency
        order = np.argsort(parts, axis=None)
        ends = np.maximum(parts[0], self._up.time_of(sources, last) + latency)
        self.ready, self._down_free = self.ready.copy(), self._down_free.copy()
        at_once = TARGETS_AT_ONCE // len(parts)
        down_bytes = coming_bytes + links.ack_share * leaving_bytes
        leave_s = float(max((up_bytes / links.up_rate).max(), (down_bytes / links.down_rate).max()))
        for number in range(0, len(targets), at_once):
            part = slice(number, number + at_once)
            some, is_sent = targets[part], sources[:, None] != targets[part]
            acked = links.ack_share * leaving_bytes[some] / np.maximum(1.0, coming[some])
            service = np.where(is_sent, nbytes[:, part] + acked, 0.0) / links.down_rate[some]
            down = self._take_down(some, parts, order, service, is_sent)
            arrive = np.maximum(ends, carried)[:, None]
            if self.windows is not None:
                slowest_s = np.maximum(1 / links.up_rate[sources, None], 1 / links.down_rate[some])
                round_trip_s = latency[:, None] + links.latency_s[some]
                leaves_in_s = self.windows.leaves_in_s(
                    sources[:, None], some, nbytes[:, part] * is_sent, slowest_s, round_trip_s
                )
                arrive = np.maximum(arrive, (begin + latency)[:, None] + leaves_in_s)
                leave_s = max(leave_s, leaves_in_s.max())
            latest = np.maximum(down, np.where(is_sent, arrive, 0.0).max(0))
            self.ready[some] = np.maximum(self.ready[some], np.where(coming[some], self._woken(latest), 0.0))
        if self.windows is not None:
            self.windows.end_wave(sources[:, None], targets, leave_s + latency.max() + links.wake_s)
        self.ready += self._slower * receive_s
        self.busy_s += send_s + receive_s
        self.messages += leaving
        self.sent += leaving_bytes
        self.sent_over_links += leaving_bytes

    def _take_down(
        self, hosts: Ints, parts: Floats, order: Ints, service: Floats, is_sent: npt.NDArray[np.bool_]
    ) -> Floats:
        """Return the times at which the downlinks of hosts have carried all messages to them, float [hosts].

        All hosts receive messages from the same sources.

        Args:
            hosts: the receiving hosts, int [hosts].
            parts: arrival times of each source's parts, float [parts, sources].
            order: indices that sort the flattened `parts`, int [parts * sources].
            service: service time of each whole message, float [sources, hosts].
            is_sent: True where a source sends to a host, bool [sources, hosts].
        """
        whole = self._down_free[hosts] + service.sum(0)
        if len(parts) > 1:
            service = np.tile(service / len(parts), (len(parts), 1))
            is_sent = np.tile(is_sent, (len(parts), 1))
        comes = self._down.clock_at(hosts, parts.ravel()[:, None])
        # As in `drained`, for queues that were empty. One order of arrival holds for all, because all receive from the
        # same sources.
        rest = service[order][::-1].cumsum(0)[::-1]
        self._down_free[hosts] = np.maximum(whole, np.where(is_sent[order], comes[order] + rest, 0.0).max(0))
        return self._down.time_of(hosts, self._down_free[hosts])

    def _parts_leave(self, hosts: Ints, begin: Floats, first: Floats, last: Floats, nbytes: Ints) -> Floats:
        """Return the times at which equal parts of each message leave its host, float [parts, messages].

        Args:
            hosts: the sending host of each message, int [messages].
            begin: the time at which each message is handed to its uplink, float [messages].
            first: reading of the uplink's clock when the uplink begins to send each message, float [messages].
            last: reading of the uplink's clock when the uplink has sent each message, float [messages].
            nbytes: lengths of messages, which determine the number of parts.
        """
        if self._constant:
            return begin[None]
        parts = 1 << int(np.log2(np.clip(nbytes.max() / LEAST_PART_BYTES, 1, MOST_PARTS)))
        shares = np.arange(parts)[:, None] / parts  # share of a message that precedes each part
        return np.maximum(begin, self._up.time_of(hosts, first + shares * (last - first)))

    def _woken(self, arrived: Floats) -> Floats:
        """Return the times at which ranks that wait for messages continue, in the shape of `arrived`."""
        on_busy_cores = np.minimum(arrived + self.links.crowded_wake_s, self.crowded_until)
        return np.maximum(arrived + self.links.wake_s, on_busy_cores)

    def _carry(self, begin: float, nbytes: float) -> float:
        """Return the time at which CPU cores have carried messages between virtual hosts; 0 if no cores do this work.

        Args:
            begin: time in seconds at which the first message is sent.
            nbytes: bytes of all these messages.
        """
        if not self.links.carry_byte_s:
            return 0.0
        self._carried = max(self._carried, begin) + self.links.carry_byte_s * nbytes / self.links.carriers
        return self._carried
