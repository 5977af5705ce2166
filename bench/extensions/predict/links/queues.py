"""Queues of fluid that never idle while something waits.

    drained(t, s) = max(free + sum s, max over k of (t_(k) + s_(k) + s_(k+1) + ...)), arrivals in order of time

This is Lindley's recursion, where t are arrivals, s what it takes to serve each, and the queue has other work until
`free`: it ends when the last busy period, begun by some arrival, has worked off what came since.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bench.extensions.predict.arrays import Floats
from collectives.schedule.waves import Ints


def drained(queue: Ints, arrival: Floats, service: Floats, free: Floats, *, alone: bool) -> Floats:
    """When each queue has done what came; `free` where nothing did.

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
    """When many queues to which the same sources send end, [queues], had they nothing to do before.

    Args:
        order: of the sources' arrivals, the same at every queue.
        arrival: float [sources, queues], or [sources, 1].
        service: float [sources, queues].
        is_sent: which messages there are, likewise.
    """
    rest = service[order][::-1].cumsum(0)[::-1]
    ends: Floats = np.where(is_sent[order], arrival[order] + rest, 0.0).max(0)
    return ends
