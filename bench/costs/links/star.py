"""Links between ranks and the one of them that serves: what is on its way at once shares them fairly, event by event.

Each rank has two queues, to the server and from it, and one message of each is on its way at a time. These share every
link that they take max-min fairly: nobody could get more of it but from someone who has no more. A link that all of a
host's ranks share is theirs in equal parts, and what a host cannot use of the server's link is the others'. What comes
to a host is acknowledged over the same link by which it sends, which leaves so much less of that, but half at least.

Source: Bertsekas and Gallager, "Data networks" (2nd edition, 1992), section 6.5.2: max-min fair rates by filling up.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import simpy

from bench.costs.arrays import Floats
from bench.costs.links.access import Links
from collectives.rounds.waves import Ints

FASTEST = 1e15
"""bytes per second, in the place of a link without a limit: nothing takes measurable time"""


class Star:
    """Messages to and from one rank.

    Args:
        env: whose clock counts.
        links: of the ranks.
        root: the rank that serves; no other is sent to.
    """

    def __init__(self, env: simpy.Environment, links: Links, root: int) -> None:
        n = links.num_ranks
        self._env, self._links, self._root = env, links, root
        self._up, self._down = (np.minimum(rates, FASTEST) for rates in (links.up_rate, links.down_rate))
        self._queues: list[collections.deque[tuple[float, simpy.Event]]] = [collections.deque() for _ in range(2 * n)]
        self._busy = np.zeros(2 * n, dtype=np.bool_)
        self._left = np.zeros(2 * n)  # bytes of the first message in each queue that are still to go
        self._rates = np.zeros(2 * n)
        self._ends = np.full(2 * n, np.inf)
        self._now = 0.0
        self._alarms = 0

    def push(self, rank: int, nbytes: float) -> simpy.Event:
        """Send so much to the server; happens when the last byte has come, behind what this rank sent before."""
        return self._send(rank, rank, nbytes)

    def answer(self, rank: int, nbytes: float) -> simpy.Event:
        """Send so much from the server to a rank; likewise."""
        return self._send(self._links.num_ranks + rank, rank, nbytes)

    def latency_s(self, rank: int, *, to_server: bool) -> float:
        """How long a byte is on its way; none within a host."""
        source, other = (rank, self._root) if to_server else (self._root, rank)
        hosts = self._links.host_of
        return 0.0 if hosts[source] == hosts[other] else float(self._links.latency_s[hosts[source]])

    def _send(self, queue: int, rank: int, nbytes: float) -> simpy.Event:
        come = self._env.event()
        if self._links.host_of[rank] == self._links.host_of[self._root]:
            return come.succeed()
        self._queues[queue].append((nbytes, come))
        if len(self._queues[queue]) == 1:
            self._move_on()
            self._busy[queue], self._left[queue] = True, nbytes
            self._share()
        return come

    def _move_on(self) -> None:
        self._left -= self._rates * (self._env.now - self._now)
        self._now = self._env.now

    def _share(self) -> None:
        """Deal the links out anew, and wake up when the next message has come."""
        busy = self._busy
        self._rates = self._fair_rates()
        self._ends = np.full(len(busy), np.inf)
        self._ends[busy] = self._now + np.maximum(0.0, self._left[busy]) / self._rates[busy]
        self._alarms += 1
        if busy.any():
            alarm = self._env.timeout(max(0.0, float(self._ends.min()) - self._now), value=self._alarms)
            assert alarm.callbacks is not None  # only what has happened has none
            alarm.callbacks.append(lambda event: self._end_messages(event.value))

    def _end_messages(self, alarm: int) -> None:
        """The first of what is on its way has come, unless the links were dealt out anew since the alarm was set."""
        if alarm != self._alarms:
            return
        ended = np.flatnonzero(self._ends == self._ends.min())
        self._move_on()
        for queue in ended.tolist():
            _, come = self._queues[queue].popleft()
            come.succeed()
            self._busy[queue] = bool(self._queues[queue])
            self._left[queue] = self._queues[queue][0][0] if self._queues[queue] else 0.0
        self._share()

    def _fair_rates(self) -> Floats:
        """Bytes per second of each queue."""
        hosts, share, busy = self._links.host_of, self._links.ack_share, self._busy
        server = hosts[self._root]
        to_server, from_server = (
            np.bincount(hosts[side], minlength=len(self._up)) for side in (busy[: len(hosts)], busy[len(hosts) :])
        )
        up = fair_shares(to_server, self._up, self._down[server])
        down = fair_shares(from_server, self._down, self._up[server])
        if share and to_server.any() and from_server.any():
            acked_up, acked_down = share * up * to_server, share * down * from_server
            up = fair_shares(to_server, _left(self._up, acked_down), _left(self._down[server], acked_down.sum()))
            down = fair_shares(from_server, _left(self._down, acked_up), _left(self._up[server], acked_up.sum()))
        return np.where(busy, np.concatenate([up[hosts], down[hosts]]), 0.0)


def _left(rate: Floats | float, acknowledged: Floats | float) -> Any:
    """What acknowledgements leave of links: half at least, for they are no more than messages that share it fairly."""
    return np.maximum(rate - acknowledged, rate / 2)


def fair_shares(count: Ints, own: Floats, shared: float) -> Floats:
    """The rate of each of a host's flows, float [hosts], where all hosts' flows meet in one link.

    Args:
        count: of each host's flows, int [hosts].
        own: rate of each host's link, likewise.
        shared: rate of the link that all of them take.
    """
    rates = np.zeros(len(count))
    used = np.flatnonzero(count)
    if not len(used):
        return rates
    full_at = own[used] / count[used]  # the rate per flow at which a host's own link is full
    order = np.argsort(full_at)
    own, count, full_at = own[used[order]], count[used[order]], full_at[order]
    taken = own.cumsum() - own
    flows_left = count[::-1].cumsum()[::-1]
    level = (shared - taken) / flows_left
    ends = np.flatnonzero(level <= full_at)
    rates[used[order]] = np.minimum(full_at, level[ends[0]] if len(ends) else np.inf)
    return rates
