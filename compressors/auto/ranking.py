"""Ranking: by how much steps are longer under one pair than under another, and which pair that puts ahead.

A pair's turn is compared with the turns of another pair right before and after it: links fade, jump and come back
within a contest, and then seconds would say which pair had the better moment. While one pair is held, single turns of
others go on (`PairwiseRatios`): long and short steps come fifty in a row where ranks share cores, so turns right after
each other meet one kind, and turns apart meet both.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from compressors.auto.choice import Pair

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


class PairwiseRatios:
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


SETTLING, TRIAL = 2, 4
"""steps that begin a turn and are not counted (first the one before is told, then one that is not like others), and
those that are"""
TIE, HARDLY_WORSE, NEAR = 1.02, 1.05, 1.3
"""times the best, up to which: a pair is as good (what was held is chosen then, or the densest), what was held does not
give way to a sparser one, and a pair is worth duels while another is held"""
JUMP = 1.5
"""ratio of the turns before and after one, above which the link jumped and nothing can be said"""


class StepSeconds(NamedTuple):
    """What a step took, on the slowest rank.

    Attributes:
        step_s: from the end of one exchange to the end of the next.
        computing_s: of that, while no result was waited for.
        wire_s: in which the communication thread sent or waited.
    """

    step_s: float
    computing_s: float
    wire_s: float


class Ranking:
    """Compares turns.

    Args:
        order: all pairs that there are, from dense to sparse.
        dense: the one that must not lose by chance.

    Attributes:
        pairs: those that had a turn, in the order of their first.
        leader: the fastest as far as is known, or as good as that one.
    """

    leader: Pair

    def __init__(self, order: Sequence[Pair], dense: Pair) -> None:
        self.pairs: list[Pair] = []
        self._order = order
        self._dense = dense
        self._turns: list[tuple[Pair, Sequence[StepSeconds]]] = []
        self._logs_of: dict[tuple[Pair, Pair], list[float]] = {}

    @property
    def latest(self) -> Pair:
        """Whose turn was the last one."""
        return self._turns[-1][0]

    def add(self, pair: Pair, taken: Sequence[StepSeconds]) -> None:
        """Count a turn: those of its steps that do."""
        self._turns.append((pair, taken))
        if not self.pairs:
            self.leader = pair
        if pair not in self.pairs:
            self.pairs.append(pair)

    def compare(self, *, whatever: bool = False) -> bool:
        """Hold the last turn but one against those right before and after, which were another pair's.

        Args:
            whatever: even where these two show that the link jumped.

        Returns:
            Whether that says anything.
        """
        (_, before), (pair, between), (other, after) = self._turns[-3:]
        low, high = sorted((usual_s(before), usual_s(after)))
        if high > JUMP * low and not whatever:
            return False
        log = math.log(usual_s(between)) - math.log(low * high) / 2  # the middle of the turn, if a link fades
        self._logs_of.setdefault((pair, other), []).append(log)
        fastest = self._fastest_first()[0]
        if TIE * self.ratio(fastest, self.leader) < 1:
            self.leader = fastest
        return True

    def ratio(self, pair: Pair, other: Pair) -> float:
        """How many times as long steps of a pair take."""
        logs = self._logs()
        return math.exp(logs[pair] - logs[other])

    def of(self, pair: Pair) -> list[StepSeconds]:
        """The steps of a pair that counted, oldest first."""
        return [seconds for who, taken in self._turns if who == pair for seconds in taken]

    def latest_s(self, pair: Pair) -> float:
        """A step in the last turn of a pair."""
        return usual_s(next(taken for who, taken in reversed(self._turns) if who == pair))

    def computing_s(self) -> float:
        """The least that computing took."""
        return min(statistics.median(each.computing_s for each in self.of(pair)) for pair in self.pairs)

    def lost_s(self, winner: Pair) -> float:
        """What the turns of all others took beyond as many steps of the winner."""
        logs = self._logs()
        return math.fsum(
            (SETTLING + len(taken)) * usual_s(taken) * (1 - math.exp(logs[winner] - logs[pair]))
            for pair, taken in self._turns
        )

    def ahead(self, racing: Sequence[Pair], close: float, field: int) -> list[Pair]:
        """The leader and the fastest of those racing, and the dense one if it is no slower than `close` times them."""
        logs = self._logs()
        fastest = sorted(racing, key=lambda pair: (pair != self.leader, logs[pair]))
        near = [pair for pair in fastest if logs[pair] <= math.log(close) + logs[self.leader]]
        return [pair for pair in near if pair in near[:field] or pair == self._dense]

    def winner(self, racing: Sequence[Pair], held: Pair | None) -> Pair:
        """What was held, if it is as good as the best; else, or where a dense one is as good, the densest that is."""
        logs, rank = self._logs(), self._order.index
        best = min(logs[pair] for pair in racing)
        winner = min((pair for pair in racing if logs[pair] <= math.log(TIE) + best), key=rank)
        if held is None or held not in racing or rank(winner) <= rank(self._dense) < rank(held):
            return winner
        patience = HARDLY_WORSE if rank(held) < rank(winner) else TIE
        return held if logs[held] <= math.log(patience) + best else winner

    def rivals(self, holder: Pair) -> list[Challenger]:
        """The pair nearest to what is held, if it is near, and the one that promised most and had the first turn."""
        others = [pair for pair in self._fastest_first() if pair != holder]
        near = [pair for pair in others[:1] if self.ratio(pair, holder) <= NEAR]
        favourite = [pair for pair in self.pairs[:1] if pair not in (holder, *near)]
        return [Challenger(pair=pair, is_near=pair in near) for pair in near + favourite]

    def ranking(self, winner: Pair) -> str:
        """What the winner took, and the next best one that was tried."""
        step_s = usual_s(self.of(winner))
        others = [pair for pair in self._fastest_first() if pair != winner]
        if others:
            next_s = step_s * self.ratio(others[0], winner)
            return f"{ms(step_s)} a step, {others[0]} {ms(next_s)}, {len(self.pairs)} pairs tried"
        return f"{ms(step_s)} a step, no other pair was worth a trial"

    def _fastest_first(self) -> list[Pair]:
        logs = self._logs()
        return sorted(logs, key=logs.__getitem__)

    def _logs(self) -> dict[Pair, float]:
        """By pair, the logarithm of what a step takes, up to a constant: the least squares over all comparisons."""
        signs = np.zeros((len(self._logs_of), len(self.pairs)))
        logs = np.zeros(len(self._logs_of))
        for row, ((pair, other), compared) in enumerate(self._logs_of.items()):
            weight = math.sqrt(len(compared))
            signs[row, self.pairs.index(pair)], signs[row, self.pairs.index(other)] = weight, -weight
            logs[row] = weight * middle(compared)
        solved, *_ = np.linalg.lstsq(signs, logs, rcond=None)
        return dict(zip(self.pairs, solved.tolist(), strict=True))


def usual_s(taken: Sequence[StepSeconds]) -> float:
    """The median step."""
    return statistics.median(each.step_s for each in taken)


def ms(seconds: float) -> str:
    """As text."""
    return f"{1000 * seconds:.3g} ms"
