"""Flows: when the messages of a sum have come, on access links of any rates that meet in one switch.

Links are queues of fluid. For rank i with `ready` R_i, and the messages m of one wave with b_m bytes:

    begin(m)  = R_source + s a k                                 k messages leave source; a: work per message
    up(h)     = drained(begin(m), b_m / uplink(h))               of all messages that leave host h: they share it
    down(h)   = drained(begin(m) + l_source, b_m / downlink(h))  of all that come to host h
    carried   = drained(begin(m), c b_m / carriers)              of all messages, where one machine's cores carry them
    alone(m)  = begin(m) + window(m) + l_source                  on a connection that was silent before
    arrive(m) = max(up(source) + l_source, down(target), carried, alone(m)) + w
    R_target  = max over its m of arrive(m), + s (a k + work(m)) k messages come; R_source = R_source + s a k

`drained` says when a queue of fluid ends (below). It too is made of sums and maxima of non-negative terms alone, so no
faster link, shorter delay or smaller message makes anything later (fair shares that flows negotiate do not promise
that). Several messages that share an uplink end together, as flows of equal weight do. What comes to a host is
acknowledged over the same link by which it sends, and lengthens the b_m of what leaves it. w is what it takes to wake a
rank up, s how much slower its host is; window(m) is that of `links.Windows`; work(m) is what is done to the payload
that came: it is unpacked, and some are merged. Nobody waits for room at the other end: what a kernel has taken travels
while the receiver still computes. On a link whose rate changes, `drained` is reckoned on the link's own clock
(`links.TraceClock`), and a message comes in parts, each when the uplink has sent what is before it: between constant
rates the first and the last decide, here the slowest place may be in the middle.

Queues of fluid that never idle while something waits.

    drained(t, s) = max(free + sum s, max over k of (t_(k) + s_(k) + s_(k+1) + ...)), arrivals in order of time

This is Lindley's recursion, where t are arrivals, s what it takes to serve each, and the queue has other work until
`free`: it ends when the last busy period, begun by some arrival, has worked off what came since.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from bench.core.errors import UsageError
from bench.extensions.predict.calibration import LinearCost
from bench.extensions.predict.links import Floats, Links, Paces, Windows
from collectives.schedule.waves import Ints, Wave


def drained(queue: Ints, arrival: Floats, service: Floats, free: Floats, *, alone: bool) -> Floats:
    """Return when each queue has served what came; `free` if nothing came.

    Args:
        queue: to which each message comes.
        arrival: of its equal parts, float [parts, messages].
        service: of all of it.
        free: when each queue is.
        alone: no queue has two messages.
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


def last_busy_period(order: Ints, arrival: Floats, service: Floats, is_sent: npt.NDArray[np.bool_]) -> Floats:
    """Return when many queues end that were empty before and that the same sources send to, float [queues].

    Args:
        order: of the sources' arrivals, the same at every queue.
        arrival: float [sources, queues], or [sources, 1].
        service: float [sources, queues].
        is_sent: which messages there are, of the same shape.
    """
    rest = service[order][::-1].cumsum(0)[::-1]
    ends: Floats = np.where(is_sent[order], arrival[order] + rest, 0.0).max(0)
    return ends


class WavePaths:
    """Links of waves between the same ranks, kept because such waves often come again.

    Attributes:
        alone: no rank sends two messages or receives two, and each has a host of its own.
        inside: which messages stay within a host; None where none does.
        leaving, coming: messages that each rank sends and receives.
        from_hosts, to_hosts: of each message, as what follows.
        latency_s: between these; 0 within one.
        round_trip_s: likewise.
        up_s, down_s: seconds per byte.
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
        """Return the bytes on uplinks and on downlinks, with acknowledgements of what goes the other way."""
        if not share:
            return nbytes.astype(float), nbytes.astype(float)
        hosts = self.num_hosts
        leaving, coming = (np.bincount(ends, nbytes, hosts) for ends in (self.from_hosts, self.to_hosts))
        num_leaving, num_coming = (np.bincount(ends, minlength=hosts) for ends in (self.from_hosts, self.to_hosts))
        up = nbytes + share * (coming / np.maximum(1, num_leaving))[self.from_hosts]
        down = nbytes + share * (leaving / np.maximum(1, num_coming))[self.to_hosts]
        return up, down

    def busiest_s(self, up_bytes: Floats, down_bytes: Floats) -> float:
        """Return how long the busiest link carries these messages."""
        up = np.bincount(self.from_hosts, up_bytes * self.up_s)
        down = np.bincount(self.to_hosts, down_bytes * self.down_s)
        return float(max(up.max(), down.max()))

    def per_source(self, values: Ints | Floats) -> Floats:
        """Sum the values of what each rank sends."""
        return np.bincount(self.sources, values, len(self.leaving)).astype(float, copy=False)

    def per_target(self, values: Ints | Floats) -> Floats:
        """Sum the values of what each rank receives."""
        return np.bincount(self.targets, values, len(self.coming)).astype(float, copy=False)


# Targets of a wave from every rank to every rank that are computed at once, so that memory stays small.
TARGETS_AT_ONCE = 256
# Most messages of one wave, each rank to each: a few GB.
MOST_MESSAGES = 1 << 28
# Most parts of a message, which arrive one after the other, where rates change.
MOST_PARTS = 16
LEAST_PART_BYTES = 1500

NOTHING = LinearCost()


class Flows:
    """Sums, one after the other, on links.

    Args:
        links: of the ranks.
        slower: the factor on what each does for messages, float [ranks].

    Attributes:
        ready: when each rank is done with what it did, seconds, float [ranks].
        busy_s: CPU time of each rank for messages, the same on a slow one.
        sent: bytes that each rank has sent.
        sent_over_links: those of them that left its host.
        messages: number of messages that each rank has sent.
        windows: of connections that are silent now and then; None: they send as much as links take.
        crowded_until: until when cores compute that ranks share, and let nobody go on at once.
    """

    def __init__(self, links: Links, slower: Floats | float = 1.0) -> None:
        self.links = links
        self._slower = slower
        self.ready = np.zeros(links.num_ranks)
        self.busy_s = np.zeros(links.num_ranks)
        self.sent = np.zeros(links.num_ranks)
        self.sent_over_links = np.zeros(links.num_ranks)
        self.messages = np.zeros(links.num_ranks)
        self.windows: Windows | None = None
        self.crowded_until = -math.inf
        self._hosts = np.arange(len(links.up_rate))
        self._up, self._down = Paces(links.up_paces), Paces(links.down_paces)
        self._constant = links.period_s is None
        self._up_free = np.zeros(len(self._hosts))  # by the clocks of links, as `_down_free`
        self._down_free = np.zeros(len(self._hosts))
        self._carried = 0.0
        self._one_per_host = links.one_per_host
        self._paths: WavePaths | None = None

    def wait_until(self, times: Floats) -> None:
        """Let no rank go on before its time, float [ranks]."""
        self.ready = np.maximum(self.ready, times)

    def work(self, seconds: Floats | float) -> None:
        """Keep every rank busy for so long."""
        self.ready = self.ready + seconds

    def run(self, waves: Iterable[Wave], *, unpack: LinearCost = NOTHING, merge: LinearCost = NOTHING) -> None:
        """Carry out one sum.

        Args:
            waves: of all ranks.
            unpack: of every message that came.
            merge: to add what came to what is there.

        Raises:
            UsageError: it is more than `MOST_MESSAGES` at a time.
        """
        for wave in waves:
            if wave.each_to_each and len(wave.sources) * len(wave.targets) > MOST_MESSAGES:
                raise UsageError(
                    f"{len(wave.sources)} ranks that each send to {len(wave.targets)} are more messages than can be "
                    "simulated at a time; choose fewer ranks"
                )
            if wave.each_to_each and self._one_per_host:
                self._run_each_to_each(wave, *self._work_on(unpack, merge, np.asarray(wave.merged)))
            else:
                sources, targets, nbytes = wave.messages()
                merged = np.broadcast_to(wave.merged, nbytes.shape)
                self._run_messages(sources, targets, nbytes, *self._work_on(unpack, merge, merged))

    def _work_on(self, unpack: LinearCost, merge: LinearCost, merged: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """Return the receiver's seconds for each message, and for each of its bytes."""
        added = merged.astype(np.float64)
        message_s: Floats = self.links.message_s + unpack.fixed_s + merge.fixed_s * added
        per_byte_s: Floats = self.links.per_byte_s + unpack.per_byte_s + merge.per_byte_s * added
        return message_s, per_byte_s

    def _run_messages(self, sources: Ints, targets: Ints, nbytes: Ints, message_s: Floats, per_byte_s: Floats) -> None:
        if not nbytes.all():
            there = nbytes > 0
            sources, targets, nbytes = sources[there], targets[there], nbytes[there]
            message_s, per_byte_s = message_s[there], per_byte_s[there]
        if not len(nbytes):
            return
        if self._paths is None or self._paths.sources is not sources or self._paths.targets is not targets:
            self._paths = WavePaths(sources, targets, self.links)
        paths = self._paths
        leaving_bytes = paths.per_source(nbytes)
        send_s = self.links.message_s * paths.leaving + self.links.per_byte_s * leaving_bytes
        receive_s = paths.per_target(message_s + per_byte_s * nbytes)
        self.ready = self.ready + self._slower * send_s
        begin = self.ready[sources]
        over_link, over_link_bytes = nbytes, leaving_bytes
        if paths.inside is not None:
            over_link = np.where(paths.inside, 0, nbytes)
            over_link_bytes = paths.per_source(over_link)
        up_bytes, down_bytes = paths.with_acknowledgements(over_link, self.links.ack_share)
        leaves = self._up.clock_at(paths.from_hosts, begin)
        first = np.maximum(self._up_free[paths.from_hosts], leaves)
        self._up_free = drained(paths.from_hosts, leaves[None], up_bytes * paths.up_s, self._up_free, alone=paths.alone)
        up = self._up.time_of(self._hosts, self._up_free)
        shares = self._shares(over_link)
        parts = self._parts_leave(paths.from_hosts, begin, first, self._up_free[paths.from_hosts], shares)
        parts = parts + paths.latency_s
        comes = self._down.clock_at(paths.to_hosts, parts)
        self._down_free = drained(paths.to_hosts, comes, down_bytes * paths.down_s, self._down_free, alone=paths.alone)
        down = self._down.time_of(self._hosts, self._down_free)
        arrive = np.maximum(parts[0], np.maximum(up[paths.from_hosts] + paths.latency_s, down[paths.to_hosts]))
        arrive = np.maximum(arrive, self._carry(begin.min(), over_link.sum()))
        if self.windows is not None:
            slowest_s = np.maximum(paths.up_s, paths.down_s)
            leaves_in_s = self.windows.leaves_in_s(sources, targets, over_link, slowest_s, paths.round_trip_s)
            arrive = np.maximum(arrive, begin + leaves_in_s + paths.latency_s)
            leave_s = max(paths.busiest_s(up_bytes, down_bytes), leaves_in_s.max())
            self.windows.end_wave(sources, targets, leave_s + paths.latency_s.max() + self.links.wake_s)
        arrive = self._woken(arrive)
        if paths.alone:
            self.ready[targets] = np.maximum(self.ready[targets], arrive)
        else:
            np.maximum.at(self.ready, targets, arrive)
        self.ready += self._slower * receive_s
        self._count(send_s + receive_s, paths.leaving, leaving_bytes, over_link_bytes)

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
        parts = self._parts_leave(sources, begin, first, last, self._shares(nbytes)) + latency
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
            woken = np.where(coming[some], self._woken(latest), 0.0)
            self.ready[some] = np.maximum(self.ready[some], woken)
        if self.windows is not None:
            self.windows.end_wave(sources[:, None], targets, leave_s + latency.max() + links.wake_s)
        self.ready += self._slower * receive_s
        self._count(send_s + receive_s, leaving, leaving_bytes, leaving_bytes)

    def _take_down(
        self, hosts: Ints, parts: Floats, order: Ints, service: Floats, is_sent: npt.NDArray[np.bool_]
    ) -> Floats:
        """Return when downlinks are done with what the same sources send to each, float [hosts].

        Args:
            hosts: which.
            parts: when each source's parts come, float [parts, sources].
            order: of all of these.
            service: of all of a source's message, float [sources, hosts].
            is_sent: which messages there are, of the same shape.
        """
        whole = self._down_free[hosts] + service.sum(0)
        if len(parts) > 1:
            service = np.tile(service / len(parts), (len(parts), 1))
            is_sent = np.tile(is_sent, (len(parts), 1))
        comes = self._down.clock_at(hosts, parts.ravel()[:, None])
        self._down_free[hosts] = np.maximum(whole, last_busy_period(order, comes, service, is_sent))
        return self._down.time_of(hosts, self._down_free[hosts])

    def _shares(self, nbytes: Ints) -> Floats:
        """Return the share of a wave's messages that has left when each part begins, float [parts]."""
        if self._constant or not nbytes.any():
            return np.zeros(1)
        parts = 1 << int(np.clip(np.log2(nbytes.max() / LEAST_PART_BYTES), 0, np.log2(MOST_PARTS)))
        return np.arange(parts) / parts

    def _parts_leave(self, hosts: Ints, begin: Floats, first: Floats, last: Floats, shares: Floats) -> Floats:
        """Return when parts of messages leave their hosts, float [parts, messages].

        Args:
            hosts: from which.
            begin: when each message comes to its uplink.
            first: what the uplink's clock shows when it begins with the message.
            last: when it ends.
            shares: of the messages that went before each part.
        """
        if self._constant:
            return begin[None]
        return np.maximum(begin, self._up.time_of(hosts, first + shares[:, None] * (last - first)))

    def _woken(self, arrived: Floats) -> Floats:
        """Return when ranks go on that waited for these messages."""
        at_once = arrived + self.links.wake_s
        in_turn = np.minimum(arrived + self.links.crowded_wake_s, self.crowded_until)
        woken: Floats = np.maximum(at_once, in_turn)
        return woken

    def _carry(self, begin: float, nbytes: float) -> float:
        """Return when the cores that carry all links are done with a wave; -inf if no cores do."""
        if not self.links.carry_byte_s:
            return 0.0
        self._carried = max(self._carried, begin) + self.links.carry_byte_s * nbytes / self.links.carriers
        return self._carried

    def _count(self, busy_s: Floats, messages: Floats, nbytes: Floats, over_links: Floats) -> None:
        self.busy_s += busy_s
        self.messages += messages
        self.sent += nbytes
        self.sent_over_links += over_links
