"""Windows: how much TCP sends before it hears that something came, where messages are long on their way.

    window(m) = max(INITIAL, w / 2^h)              w: what the connection has had before; h: whole timeouts of silence
    stall(m)  = sum over j < k of max(0, rtt - window(m) 2^j / rate)     k: flights before the last
    w         = max(window(m), b_m)                then it has opened for the whole message

Silence halves the window of a connection, timeout after timeout, down to that of a new one, and slow start doubles it
each round trip again. The timeout is the shortest that the kernel knows: it grows with the round trip, but then a
longer way could make a step shorter.

Sources: RFC 6928 (ten segments at first), RFC 5681 sections 3.1 and 4.1, RFC 2861 section 2; Linux, `tcp_cwnd_restart`.
"""

from __future__ import annotations

import numpy as np

from bench.costs.arrays import Floats
from collectives.rounds.waves import Ints

INITIAL_BYTES = 10 * 1448
TIMEOUT_S = 0.2
ALL_HALVED = 60.0
"""timeouts after which any window is the first one"""


class Windows:
    """Of all connections between some ranks; they are new, which matters where long steps are what keeps windows small.

    Args:
        num_ranks: that each may send to each.
    """

    def __init__(self, num_ranks: int) -> None:
        self._bytes = np.full((num_ranks, num_ranks), float(INITIAL_BYTES))
        self._sent_at = np.zeros((num_ranks, num_ranks))  # of the last message

    def stall_s(
        self, sources: Ints, targets: Ints, *, begin: Floats, nbytes: Ints, byte_s: Floats, rtt_s: Floats
    ) -> Floats:
        """How long messages wait for their windows, while the link could carry them; shapes are broadcast.

        Args:
            sources: rank that sends each message.
            targets: rank that it is for.
            begin: when it is handed over.
            nbytes: its length; 0: there is none.
            byte_s: the time that a byte of it takes of its link, with what shares the link.
            rtt_s: until an answer to it would come.
        """
        connections = sources, targets
        timeouts = np.clip((begin - self._sent_at[connections]) // TIMEOUT_S, 0.0, ALL_HALVED)
        window = np.maximum(INITIAL_BYTES, self._bytes[connections] / 2.0**timeouts)
        opened = np.maximum(window, nbytes)
        stall_s, left = np.zeros(opened.shape), nbytes - window
        while (left > 0).any():
            stall_s += np.where(left > 0, np.maximum(0.0, rtt_s - window * byte_s), 0.0)
            window = 2 * window
            left = left - window
        is_sent = np.broadcast_to(nbytes > 0, opened.shape)
        self._bytes[connections] = np.where(is_sent, opened, self._bytes[connections])
        self._sent_at[connections] = np.where(is_sent, begin + stall_s + nbytes * byte_s, self._sent_at[connections])
        return stall_s
