"""Duels: turns of other pairs while one is held, against steps of that one right before and after.

Long and short steps come fifty on end where ranks share cores, so that turns right after each other meet one kind;
turns apart meet both, and a few of a pair that is nearly as good cost hardly anything.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Collection

from compressors.choice import Pair

MOST, ENOUGH = 16, 4
"""the latest that count, and how many there must be"""
DUEL_REST, LONGEST_REST = 32, 2048
"""steps until another pair has a turn; doubled as long as it proves slower"""
PROVES_SLOWER = 1.05
"""times what is held, from which it does"""


@dataclasses.dataclass
class Challenger:
    """A pair that is not held but may be better.

    Attributes:
        pair: which.
        is_near: its turns cost little.
        due: steps of watching, after which it has one.
    """

    pair: Pair
    is_near: bool
    due: int = DUEL_REST
    _rest: int = DUEL_REST

    def had_a_turn(self, at: int, ratio: float) -> None:
        """Where steps take `ratio` times those of what is held, as far as is known."""
        self._rest = min(LONGEST_REST, 2 * self._rest) if ratio > PROVES_SLOWER else DUEL_REST
        self.due = at + self._rest


class Duels:
    """How much longer steps of one pair took than those of another, over a whole run."""

    def __init__(self) -> None:
        self._logs: dict[tuple[Pair, Pair], collections.deque[float]] = {}

    def add(self, pair: Pair, other: Pair, ratio: float) -> None:
        """One more outcome: a step of `pair` took `ratio` times one of `other`."""
        for key, log in (((pair, other), math.log(ratio)), ((other, pair), -math.log(ratio))):
            self._logs.setdefault(key, collections.deque(maxlen=MOST)).append(log)

    def ratio(self, pair: Pair, other: Pair) -> float | None:
        """Over outcomes, whose middle half counts, for a link may jump within a duel; None where they are too few."""
        logs = self._logs.get((pair, other), ())
        return math.exp(middle(logs)) if len(logs) >= ENOUGH else None


def middle(values: Collection[float]) -> float:
    """The mean of the middle half; of fewer than four, of all."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])
