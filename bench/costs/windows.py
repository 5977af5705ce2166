"""TCP's windows: how long a message is under way on a connection that was silent while its ranks computed.

A window grows to twice what is under way at once. After every timeout of silence, 0.2 s and a round trip, a connection
may send half as much at once as before, and no less than ten segments; then twice as much in every round trip. With w
bytes at first, b in all, at rate c and a round trip of r,

    leaves in  max(w/c, r) + max(2w/c, r) + ... + what is left / c

A longer delay means fewer timeouts, and so could make a message leave sooner: what counts is the longest of this delay
and all shorter ones, so that no faster link, shorter delay or silence, or smaller message makes one longer. What was
sent since on the same connection counts as its window, and the silence is that of compute alone: pauses within an
exchange follow from windows themselves, and with them a faster link could make a step longer.

Sources: Handley, Padhye, Floyd 2000 (RFC 2861), section 3.2, as Linux does in `tcp_cwnd_restart`, and `is_cwnd_limited`
for what is under way; Chu et al. 2013 (RFC 6928); Paxson et al. 2011 (RFC 6298), with Linux's least deviation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bench.costs.arrays import Floats
from collectives.rounds.waves import Ints

LEAST_TIMEOUT_S = 0.2
"""of Linux, beside the round trip"""
SEGMENT_BYTES = 1448
LEAST_WINDOW_BYTES = 10 * SEGMENT_BYTES


class Windows:
    """Of all connections between ranks, in one step.

    Args:
        num_ranks: that are connected.
        silence_s: since the step before.
    """

    def __init__(self, num_ranks: int, silence_s: float) -> None:
        self._silence_s = silence_s
        self._sent = np.zeros((num_ranks, num_ranks), dtype=np.float32)

    def leaves_in_s(
        self,
        sources: npt.NDArray[np.int64],
        targets: npt.NDArray[np.int64],
        nbytes: Ints,
        byte_s: Floats,
        round_trip_s: Floats,
    ) -> Floats:
        """Seconds in which messages leave that have their links to themselves; all arguments broadcast.

        Args:
            sources: ranks that send.
            targets: to which.
            nbytes: of each message.
            byte_s: of the slowest link on its way.
            round_trip_s: of that.
        """
        sent = np.maximum(LEAST_WINDOW_BYTES, self._sent[sources, targets])
        self._sent[sources, targets] = np.maximum(self._sent[sources, targets], nbytes)
        leaves: Floats = nbytes * byte_s
        for timeouts in range(2, 1 + int(self._silence_s / LEAST_TIMEOUT_S)):  # the first halves what is not used
            window = np.maximum(sent, 2 * nbytes * 0.5**timeouts)
            longest_s = np.minimum(round_trip_s, self._silence_s / timeouts - LEAST_TIMEOUT_S)
            leaves = np.maximum(leaves, _leaves_in_s(window, nbytes, byte_s, longest_s))
        return leaves


def _leaves_in_s(window: Floats, nbytes: Ints, byte_s: Floats, round_trip_s: Floats) -> Floats:
    left = nbytes.astype(np.float64)
    seconds = np.zeros(np.broadcast_shapes(left.shape, byte_s.shape))
    while (waits := left > window).any():
        seconds += np.where(waits, np.maximum(window * byte_s, round_trip_s), 0.0)
        left, window = np.where(waits, left - window, left), np.where(waits, 2 * window, window)
    leaves: Floats = seconds + left * byte_s
    return leaves
