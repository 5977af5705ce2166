"""TCP's windows: how long a message is under way on a connection that was silent before.

A window grows by what is sent while it is full, to twice what is under way at once: to the length of a message that is
the only one of its step, and to twice that where others follow on the same connection. After every timeout of silence,
0.2 s and a round trip, a connection may send half as much at once as before, and no less than ten segments; then twice
as much in every round trip. With w bytes at first, b in all, at rate c and a round trip of r,

    leaves in  max(w/c, r) + max(2w/c, r) + ... + what is left / c

Connections are silent while their ranks compute, and within a sum while it goes on elsewhere: a tree's leaf sends up
and is silent until its next sum. Messages that fit into ten segments let no window grow, so the silences
before and after them add up; one no longer than the least timeout breaks nothing. What was sent since the last silence
counts as the window.

A silence is made of waves that take as long as their slowest message, which is more than where others do not wait for
it, and less than where ranks compute meanwhile; and a longer delay means fewer timeouts, and so could make a message
leave sooner: what counts is the longest of this delay and all shorter ones. So no faster link, shorter delay or
silence, or smaller message makes one longer, which the time between two messages itself would not promise.

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


NEW_S = 60.0
"""of silence, after which windows are as small as those of new connections"""


class Windows:
    """Of all connections between ranks, wave after wave and step after step.

    Args:
        num_ranks: that are connected.
        are_new: begin with new connections; else with some that just sent what they will send.
    """

    def __init__(self, num_ranks: int, *, are_new: bool) -> None:
        between_ranks = num_ranks, num_ranks
        self._clock_s = NEW_S if are_new else 0.0
        self._sent_until_s = np.zeros(between_ranks)  # by this clock
        self._silence_s = np.zeros(between_ranks, dtype=np.float32)  # since a long message of the step before
        self._silence_since_s = np.zeros_like(self._silence_s)  # since the last long message
        self._longest = np.zeros_like(self._silence_s)
        self._sent = np.zeros_like(self._silence_s)  # of all messages of the step
        self._is_grown = np.zeros(between_ranks, dtype=np.bool_)
        self._has_begun = False

    def begin_step(self, silence_s: float) -> None:
        """After so many seconds in which nothing was sent."""
        self._clock_s += silence_s
        if self._has_begun:
            self._is_grown = (self._sent > 0) & (self._sent >= 2 * self._longest)
            self._silence_s[:] = self._silence_since_s
            self._longest[:] = self._sent[:] = 0
        self._has_begun = True

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
        silence_s, since_s = self._break_silence(sources, targets, nbytes)
        sent = np.maximum(LEAST_WINDOW_BYTES, np.where(since_s > 0, 0.0, self._longest[sources, targets]))
        self._longest[sources, targets] = np.maximum(self._longest[sources, targets], nbytes)
        self._sent[sources, targets] += nbytes
        grown = (1 + self._is_grown[sources, targets]) * nbytes
        leaves: Floats = nbytes * byte_s
        for timeouts in range(1, 1 + int(silence_s.max(initial=0) / LEAST_TIMEOUT_S)):
            window = np.maximum(sent, grown * 0.5**timeouts)
            longest_s = np.clip(silence_s / timeouts - LEAST_TIMEOUT_S, 0.0, round_trip_s)
            leaves = np.maximum(leaves, _leaves_in_s(window, nbytes, byte_s, longest_s))
            if (window == sent).all():  # more timeouts make none smaller, and come with shorter delays
                break
        return leaves

    def _break_silence(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], nbytes: Ints
    ) -> tuple[Floats, Floats]:
        """Seconds for which connections were silent, since a long message of the step before and since the last one."""
        silence_s = self._clock_s - self._sent_until_s[sources, targets]
        silence_s = np.where(silence_s > LEAST_TIMEOUT_S, silence_s, 0.0)
        since_s = self._silence_since_s[sources, targets] + silence_s
        cycle_s = self._silence_s[sources, targets] + silence_s
        self._silence_s[sources, targets] = cycle_s
        self._silence_since_s[sources, targets] = np.where(nbytes > LEAST_WINDOW_BYTES, 0.0, since_s)
        return cycle_s, since_s

    def end_wave(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], leaves_in_s: float, latency_s: float
    ) -> None:
        """Nobody sends anything else before this wave has come.

        Args:
            sources: ranks that have sent.
            targets: to which.
            leaves_in_s: until all of it has left.
            latency_s: until then it comes.
        """
        self._clock_s += leaves_in_s
        self._sent_until_s[sources, targets] = self._clock_s
        self._clock_s += latency_s


def _leaves_in_s(window: Floats, nbytes: Ints, byte_s: Floats, round_trip_s: Floats) -> Floats:
    left = nbytes.astype(np.float64)
    seconds = np.zeros(np.broadcast_shapes(left.shape, byte_s.shape))
    while (waits := left > window).any():
        seconds += np.where(waits, np.maximum(window * byte_s, round_trip_s), 0.0)
        left, window = np.where(waits, left - window, left), np.where(waits, 2 * window, window)
    leaves: Floats = seconds + left * byte_s
    return leaves
