"""TCP's windows: how long a message is under way on a connection that was silent while its ranks computed.

A window grows by what is sent while it is full, to twice what is under way at once: to the length of a message that is
the only one of its step, and to twice that where others follow on the same connection. After every timeout of silence,
0.2 s and a round trip, a connection may send half as much at once as before, and no less than ten segments; then twice
as much in every round trip. With w bytes at first, b in all, at rate c and a round trip of r,

    leaves in  max(w/c, r) + max(2w/c, r) + ... + what is left / c

A longer delay means fewer timeouts, and so could make a message leave sooner: what counts is the longest of this delay
and all shorter ones, so that no faster link, shorter delay or silence, or smaller message makes one longer. What was
sent since on the same connection counts as its window, and the silence is that of compute and of one delay: pauses
within an exchange follow from windows themselves, and with them a faster link could make a step longer.

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
    """Of all connections between ranks, step after step.

    Args:
        num_ranks: that are connected.
    """

    def __init__(self, num_ranks: int) -> None:
        self._silence_s = 0.0
        self._longest = np.zeros((num_ranks, num_ranks), dtype=np.float32)
        self._sent = np.zeros_like(self._longest)  # of all messages of the step
        self._is_grown = np.zeros((num_ranks, num_ranks), dtype=np.bool_)

    def begin_step(self, silence_s: float) -> None:
        """After so many seconds in which nothing was sent."""
        self._silence_s = silence_s
        self._is_grown = (self._sent > 0) & (self._sent >= 2 * self._longest)
        self._longest[:] = self._sent[:] = 0

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
        sent = np.maximum(LEAST_WINDOW_BYTES, self._longest[sources, targets])
        self._longest[sources, targets] = np.maximum(self._longest[sources, targets], nbytes)
        self._sent[sources, targets] += nbytes
        grown = (1 + self._is_grown[sources, targets]) * nbytes
        leaves: Floats = nbytes * byte_s
        for timeouts in range(1, 1 + int(self._silence_s / LEAST_TIMEOUT_S)):
            window = np.maximum(sent, grown * 0.5**timeouts)
            longest_s = np.minimum(round_trip_s, self._silence_s / timeouts - LEAST_TIMEOUT_S)
            leaves = np.maximum(leaves, _leaves_in_s(window, nbytes, byte_s, longest_s))
            if (window == sent).all():  # more timeouts make none smaller, and come with shorter delays
                break
        return leaves


def _leaves_in_s(window: Floats, nbytes: Ints, byte_s: Floats, round_trip_s: Floats) -> Floats:
    left = nbytes.astype(np.float64)
    seconds = np.zeros(np.broadcast_shapes(left.shape, byte_s.shape))
    while (waits := left > window).any():
        seconds += np.where(waits, np.maximum(window * byte_s, round_trip_s), 0.0)
        left, window = np.where(waits, left - window, left), np.where(waits, 2 * window, window)
    leaves: Floats = seconds + left * byte_s
    return leaves
