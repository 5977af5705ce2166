"""Duels: how much longer steps of one pair took than those of another right beside them, over a whole run."""

from __future__ import annotations

import collections
import math
import statistics

from compressors.choice import Pair

MOST, ENOUGH = 16, 4
"""the latest that count, and how many there must be"""


class Duels:
    """Keeps the outcomes, by pair and pair."""

    def __init__(self) -> None:
        self._logs: dict[tuple[Pair, Pair], collections.deque[float]] = {}

    def add(self, pair: Pair, other: Pair, ratio: float) -> None:
        """One more outcome: a step of `pair` took `ratio` times one of `other`."""
        for key, log in (((pair, other), math.log(ratio)), ((other, pair), -math.log(ratio))):
            self._logs.setdefault(key, collections.deque(maxlen=MOST)).append(log)

    def ratio(self, pair: Pair, other: Pair) -> float | None:
        """The geometric mean of the middle half, for a link may jump within a duel; None where that is too little."""
        logs = sorted(self._logs.get((pair, other), ()))
        quarter = len(logs) // 4
        return math.exp(statistics.fmean(logs[quarter : len(logs) - quarter])) if len(logs) >= ENOUGH else None
