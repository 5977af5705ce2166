"""Ranking of pairs by the ratios of their step times.

A trial is a few consecutive steps with one pair. It is compared with trials of another pair right before and after it,
because the speed of a link may change during the trials, so that step times in seconds are not comparable. While a pair
is in use, single trials of other pairs continue (`PairwiseRatios`): if ranks share cores, about fifty long steps in a
row alternate with about fifty short ones, so consecutive trials see only one kind, and trials far apart see both.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from compressors.auto.choice import Pair

MOST, ENOUGH = 16, 4  # number of latest results for two pairs that count, and the number that is needed
# Number of steps until a rival is tried; doubled each time its steps take over PROVES_SLOWER times as long as those of
# the pair in use, up to LONGEST_REST.
RIVAL_REST, LONGEST_REST = 32, 2048
PROVES_SLOWER = 1.05


@dataclasses.dataclass
class Challenger:
    """A pair that is not in use but may be better.

    Attributes:
        pair: the pair.
        is_near: True if its step time is close to that of the pair in use, so that trials cost little.
        due: number of watched steps after which it is tried.
    """

    pair: Pair
    is_near: bool
    due: int = RIVAL_REST
    _rest: int = RIVAL_REST

    def had_a_turn(self, at: int, ratio: float) -> None:
        """Set when this pair is tried next, after a trial of it.

        Args:
            at: number of watched steps when the trial ended.
            ratio: step time of the trial / step time of the pair in use.
        """
        self._rest = min(LONGEST_REST, 2 * self._rest) if ratio > PROVES_SLOWER else RIVAL_REST
        self.due = at + self._rest


class PairwiseRatios:
    """The ratios of the step times of two pairs, over a whole run."""

    def __init__(self) -> None:
        self._logs: dict[tuple[Pair, Pair], collections.deque[float]] = {}

    def add(self, pair: Pair, other: Pair, ratio: float) -> None:
        """Add a result: a step of `pair` took `ratio` times as long as one of `other`."""
        for key, log in (((pair, other), math.log(ratio)), ((other, pair), -math.log(ratio))):
            self._logs.setdefault(key, collections.deque(maxlen=MOST)).append(log)

    def ratio(self, pair: Pair, other: Pair) -> float | None:
        """Return the mean ratio of the middle half of the results, or None if there are too few.

        The smallest and largest quarters do not count, because the link's speed may jump during a trial.
        """
        logs = self._logs.get((pair, other), ())
        return math.exp(middle(logs)) if len(logs) >= ENOUGH else None


def middle(values: Collection[float]) -> float:
    """Return the mean of the middle half of the values; of all values if there are fewer than four."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


# Numbers of steps of a trial: at its start, steps that do not count (the first still belongs to the trial before, and
# the second differs from the others), and then steps that count.
SETTLING, TRIAL = 2, 4
# Step times divided by the best. Up to TIE, a pair is as good as the best; then the pair in use is kept, or the densest
# is chosen. Up to HARDLY_WORSE, the pair in use is not replaced by a sparser one. Up to NEAR, a pair is tried again
# while another is in use.
TIE, HARDLY_WORSE, NEAR = 1.02, 1.05, 1.3
# If the trials before and after a trial differ by more than this ratio, the link's speed jumped and the trial is void.
JUMP = 1.5


class StepSeconds(NamedTuple):
    """The time of a step on the slowest rank.

    Attributes:
        step_s: seconds from the end of one exchange to the end of the next.
        computing_s: seconds from the end of the exchange until backward handed over the last bucket.
        wire_s: seconds in which the communication thread sent messages or waited for them.
    """

    step_s: float
    computing_s: float
    wire_s: float


class Ranking:
    """Comparison of a series of trials.

    Args:
        order: all pairs, from dense to sparse.
        dense: the dense pair, which is tried more often than others so that noise does not exclude it.

    Attributes:
        pairs: the pairs that were tried, in the order of their first trials.
        leader: the fastest pair so far, or one that is as good.
    """

    leader: Pair

    def __init__(self, order: Sequence[Pair], dense: Pair) -> None:
        self.pairs: list[Pair] = []
        self._order, self._dense = order, dense
        self._turns: list[tuple[Pair, Sequence[StepSeconds]]] = []
        self._logs_of: dict[tuple[Pair, Pair], list[float]] = {}

    @property
    def latest(self) -> Pair:
        """Return the pair of the last trial."""
        return self._turns[-1][0]

    def add(self, pair: Pair, taken: Sequence[StepSeconds]) -> None:
        """Add the steps of a trial that count."""
        self._turns.append((pair, taken))
        if not self.pairs:
            self.leader = pair
        if pair not in self.pairs:
            self.pairs.append(pair)

    def compare(self, *, whatever: bool = False) -> bool:
        """Compare the second last trial with the trials of another pair right before and after it.

        Args:
            whatever: compare even if those two trials show that the link's speed jumped.

        Returns:
            False if the link's speed jumped, so that nothing was compared.
        """
        (_, before), (pair, between), (other, after) = self._turns[-3:]
        low, high = sorted((usual_s(before), usual_s(after)))
        if high > JUMP * low and not whatever:
            return False
        log = math.log(usual_s(between)) - math.log(low * high) / 2  # the geometric mean corrects for a slow drift
        self._logs_of.setdefault((pair, other), []).append(log)
        fastest = self._fastest_first()[0]
        if TIE * self.ratio(fastest, self.leader) < 1:
            self.leader = fastest
        return True

    def ratio(self, pair: Pair, other: Pair) -> float:
        """Return the step time of `pair` / the step time of `other`."""
        logs = self._logs()
        return math.exp(logs[pair] - logs[other])

    def of(self, pair: Pair) -> list[StepSeconds]:
        """Return the steps of a pair that count, the oldest first."""
        return [seconds for who, taken in self._turns if who == pair for seconds in taken]

    def latest_s(self, pair: Pair) -> float:
        """Return the usual step time in the last trial of a pair."""
        return usual_s(next(taken for who, taken in reversed(self._turns) if who == pair))

    def computing_s(self) -> float:
        """Return the shortest of all pairs' median computing times, in seconds."""
        return min(statistics.median(each.computing_s for each in self.of(pair)) for pair in self.pairs)

    def lost_s(self, winner: Pair) -> float:
        """Return the seconds that all trials took longer than the same number of steps of the winner would have."""
        logs = self._logs()
        return math.fsum(
            (SETTLING + len(taken)) * usual_s(taken) * (1 - math.exp(logs[winner] - logs[pair]))
            for pair, taken in self._turns
        )

    def ahead(self, racing: Sequence[Pair], close: float, field: int) -> list[Pair]:
        """Return the pairs that take at most `close` times as long as the leader: the `field` fastest, and the dense.

        The leader is first, then the others from fast to slow.
        """
        logs = self._logs()
        fastest = sorted(racing, key=lambda pair: (pair != self.leader, logs[pair]))
        near = [pair for pair in fastest if logs[pair] <= math.log(close) + logs[self.leader]]
        return [pair for pair in near if pair in near[:field] or pair == self._dense]

    def winner(self, racing: Sequence[Pair], held: Pair | None) -> Pair:
        """Return the pair in use if it is as good as the best; otherwise the densest pair that is.

        A dense pair that is as good as the best also replaces a sparse pair in use.
        """
        logs, rank = self._logs(), self._order.index
        best = min(logs[pair] for pair in racing)
        winner = min((pair for pair in racing if logs[pair] <= math.log(TIE) + best), key=rank)
        if held is None or held not in racing or rank(winner) <= rank(self._dense) < rank(held):
            return winner
        patience = HARDLY_WORSE if rank(held) < rank(winner) else TIE
        return held if logs[held] <= math.log(patience) + best else winner

    def rivals(self, holder: Pair) -> list[Challenger]:
        """Return the second best pair, if it is near, and the pair that was tried first because its cost was lowest."""
        others = [pair for pair in self._fastest_first() if pair != holder]
        near = [pair for pair in others[:1] if self.ratio(pair, holder) <= NEAR]
        favourite = [pair for pair in self.pairs[:1] if pair not in (holder, *near)]
        return [Challenger(pair=pair, is_near=pair in near) for pair in near + favourite]

    def summary(self, winner: Pair) -> str:
        """Return text with the step times of the winner and of the second best pair."""
        step_s = usual_s(self.of(winner))
        if (second := next((pair for pair in self._fastest_first() if pair != winner), None)) is None:
            return f"{ms(step_s)} a step, no other pair was worth a trial"
        next_s = step_s * self.ratio(second, winner)
        return f"{ms(step_s)} a step, {second} {ms(next_s)}, {len(self.pairs)} pairs tried"

    def _fastest_first(self) -> list[Pair]:
        logs = self._logs()
        return sorted(logs, key=logs.__getitem__)

    def _logs(self) -> dict[Pair, float]:
        """Return the logarithm of each pair's step time, up to a constant, by least squares over all comparisons."""
        signs, logs = np.zeros((len(self._logs_of), len(self.pairs))), np.zeros(len(self._logs_of))
        for row, ((pair, other), compared) in enumerate(self._logs_of.items()):
            weight = math.sqrt(len(compared))
            signs[row, self.pairs.index(pair)], signs[row, self.pairs.index(other)] = weight, -weight
            logs[row] = weight * middle(compared)
        solved, *_ = np.linalg.lstsq(signs, logs, rcond=None)
        return dict(zip(self.pairs, solved.tolist(), strict=True))


def usual_s(taken: Sequence[StepSeconds]) -> float:
    """Return the median step time."""
    return statistics.median(each.step_s for each in taken)


def ms(seconds: float) -> str:
    """Return the seconds as text in milliseconds."""
    return f"{1000 * seconds:.3g} ms"
