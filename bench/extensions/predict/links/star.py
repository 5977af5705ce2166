"""Links between ranks and the one of them that serves: what is on its way at once shares them fairly, event by event.

Each rank has two queues, to the server and from it, and one message of each is on its way at a time. These share every
link that they take max-min fairly: nobody could get more of it but from someone who has no more. A link that all of a
host's ranks share is theirs in equal parts, and what a host cannot use of the server's link is the others'. What comes
to a host is acknowledged over the same link by which it sends, which leaves so much less of that, but half at least.

Source: Bertsekas and Gallager, "Data networks" (2nd edition, 1992), section 6.5.2: max-min fair rates by filling up.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from bench.extensions.predict.arrays import Floats
from bench.extensions.predict.links.access import Links
from bench.extensions.predict.sharing import FairShareQueue
from collectives.schedule.waves import Ints

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
        self._queues = [simpy.Resource(env) for _ in range(2 * n)]
        self._wires = FairShareQueue(env, 2 * n, self._fair_rates)

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
        if self._links.host_of[rank] == self._links.host_of[self._root]:
            return self._env.event().succeed()
        return self._env.process(self._carry(queue, nbytes))

    def _carry(self, queue: int, nbytes: float) -> Generator[simpy.Event, Any, None]:
        with self._queues[queue].request() as turn:
            yield turn
            yield self._wires.begin(queue, nbytes)

    def _fair_rates(self, busy: npt.NDArray[np.bool_]) -> Floats:
        """Bytes per second of each queue."""
        hosts, share = self._links.host_of, self._links.ack_share
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
