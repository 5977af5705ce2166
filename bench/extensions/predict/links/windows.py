"""TCP's windows: how long a message is under way on a connection that was silent before.

A window grows by what is sent while it is full, to twice what is under way at once: to the length of a message that is
the only one of its step, and to twice that where others follow on the same connection. After every timeout of silence,
0.2 s and a round trip, a connection may send half as much at once as before, and no less than ten segments; then twice
as much in every round trip. With w bytes at first, b in all, at rate c and a round trip of r,

    leaves in  max(w/c, r) + max(2w/c, r) + ... + what is left / c

Connections are silent while their ranks compute (`Windows`), and within a step while a sum goes on elsewhere: a tree's
leaf sends up, and then not until its next sum (`SettlingWindows`).

A longer delay means fewer timeouts, and so could make a message leave sooner: what counts is the longest of this delay
and all shorter ones. A silence within a step is that of the whole waves that passed meanwhile, each as long as its
slowest message and its busiest link at mean rates: what others do not wait for is too much in it, and what ranks
compute between waves is missing. So no faster link and no shorter delay or silence makes a message later, which the
time between two messages itself would not promise.

Sources: Handley, Padhye, Floyd 2000 (RFC 2861), section 3.2, as Linux does in `tcp_cwnd_restart`, and `is_cwnd_limited`
for what is under way; Chu et al. 2013 (RFC 6928); Paxson et al. 2011 (RFC 6298), with Linux's least deviation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from bench.extensions.predict.arrays import Floats
from collectives.schedule.waves import Ints

LEAST_TIMEOUT_S = 0.2
"""of Linux, beside the round trip"""
SEGMENT_BYTES = 1448
LEAST_WINDOW_BYTES = 10 * SEGMENT_BYTES
NEW_S = 60.0
"""of silence, after which windows are as small as those of new connections"""
TIE_S = 1e-6
"""by which a silence is longer than a timeout, however times were added up"""


class Windows:
    """Of all connections between ranks, which are silent between steps alone.

    Args:
        num_ranks: that are connected.
    """

    def __init__(self, num_ranks: int) -> None:
        self._silence_s = 0.0
        self._longest = np.zeros((num_ranks, num_ranks), dtype=np.float32)
        self._sent = np.zeros((num_ranks, num_ranks), dtype=np.float32)  # of all messages of the step
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
        per_byte_s: Floats,
        round_trip_s: Floats,
    ) -> Floats:
        """Seconds in which messages leave that have their links to themselves; all arguments broadcast.

        Args:
            sources: ranks that send.
            targets: to which.
            nbytes: of each message.
            per_byte_s: of the slowest link on its way.
            round_trip_s: of that.
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
            if (window == sent).all():  # more timeouts make none smaller, and come with shorter delays
                break
        return leaves

    def _before(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], nbytes: Ints
    ) -> tuple[Floats, Floats]:
        """(seconds of silence since a window was as long as the message, bytes that were sent at once since)."""
        return np.asarray(self._silence_s), self._longest[sources, targets].astype(np.float64)

    def end_wave(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], seconds: float) -> None:
        """A wave has come that took so long.

        Args:
            sources: ranks that have sent.
            targets: to which.
            seconds: until all of it was there.
        """


class SettlingWindows(Windows):
    """Of connections that are new, and silent within steps too, over as many steps as it takes until they are settled.

    Silences add up until a message is at least half as long as the longest of the step before, which lets the window
    grow again.
    """

    def __init__(self, num_ranks: int) -> None:
        super().__init__(num_ranks)
        self._clock_s = NEW_S
        self._came_at_s = np.zeros((num_ranks, num_ranks))  # by this clock
        self._silences_s = np.zeros((num_ranks, num_ranks))
        self._window = np.zeros((num_ranks, num_ranks))  # bytes
        self._longest_before = np.full((num_ranks, num_ranks), np.inf)

    @override
    def begin_step(self, silence_s: float) -> None:
        if self._longest.any():
            self._longest_before = self._longest.astype(np.float64)
        super().begin_step(silence_s)
        self._clock_s += silence_s

    @override
    def _before(
        self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], nbytes: Ints
    ) -> tuple[Floats, Floats]:
        silence_s = self._clock_s - self._came_at_s[sources, targets]
        is_silent = silence_s > LEAST_TIMEOUT_S + TIE_S
        silences_s = self._silences_s[sources, targets] + is_silent * silence_s
        window = np.where(is_silent, 0.0, self._window[sources, targets])
        is_long = 2 * nbytes >= self._longest_before[sources, targets]
        self._silences_s[sources, targets] = np.where(is_long, 0.0, silences_s)
        self._window[sources, targets] = np.maximum(window, nbytes)
        return silences_s, window

    @override
    def end_wave(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64], seconds: float) -> None:
        self._clock_s += seconds
        self._came_at_s[sources, targets] = self._clock_s


def _leaves_in_s(window: Floats, nbytes: Ints, per_byte_s: Floats, round_trip_s: Floats) -> Floats:
    left = nbytes.astype(np.float64)
    seconds = np.zeros(np.broadcast_shapes(left.shape, per_byte_s.shape))
    while (waits := left > window).any():
        seconds += np.where(waits, np.maximum(window * per_byte_s, round_trip_s), 0.0)
        left, window = np.where(waits, left - window, left), np.where(waits, 2 * window, window)
    leaves: Floats = seconds + left * per_byte_s
    return leaves
