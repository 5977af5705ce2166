"""Rank compressor-collective pairs by the ratios of their step times.

A trial is a few consecutive training steps with one pair. The trial is compared with trials of another pair right
before and right after it, because the link's speed may change, so seconds measured at different times are not
comparable. After a pair has been chosen, single trials of other pairs continue (`PairwiseRatios`). If ranks share
cores, about fifty long steps in a row alternate with about fifty short steps. Consecutive trials then see only one kind
of steps, while trials far apart see both.
"""

import collections
import dataclasses
import math
import statistics
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from compressors.auto.choice import Pair

MOST, ENOUGH = 16, 4  # ratios of two pairs: this many of the latest ratios count, and this many are needed
# Number of steps until another pair is tried. It is doubled each time when the steps of that pair take more than
# PROVES_SLOWER times as long as the steps of the pair in use, up to LONGEST_REST.
RIVAL_REST, LONGEST_REST = 32, 2048
PROVES_SLOWER = 1.05


@dataclasses.dataclass
class Challenger:
    """A compressor-collective pair that may be faster than the one in use, and is therefore tried again and again.

    Attributes:
        pair: the compressor and the collective.
        is_near: True if its step time is close to that of the pair in use, so that trials cost little.
        due: number of steps with the pair in use (`LinkKnowledge.watched`) after which the next trial starts.
    """

    pair: Pair
    is_near: bool
    due: int = RIVAL_REST
    _rest: int = RIVAL_REST

    def schedule_after(self, at: int, ratio: float) -> None:
        """Set `due`, the step of the next trial, after a trial; a pair that was slow waits longer.

        Args:
            at: number of steps with the pair in use (`LinkKnowledge.watched`) when the trial ended.
            ratio: step time in the trial / step time of the pair in use.
        """
        self._rest = min(LONGEST_REST, 2 * self._rest) if ratio > PROVES_SLOWER else RIVAL_REST
        self.due = at + self._rest


class PairwiseRatios:
    """Ratios of the step times of two compressor-collective pairs, collected over a whole run."""

    def __init__(self) -> None:
        self._logs: dict[tuple[Pair, Pair], collections.deque[float]] = {}

    def add(self, pair: Pair, other: Pair, ratio: float) -> None:
        """Record that a training step with `pair` took `ratio` times as long as a step with `other`."""
        for key, log in (((pair, other), math.log(ratio)), ((other, pair), -math.log(ratio))):
            self._logs.setdefault(key, collections.deque(maxlen=MOST)).append(log)

    def ratio(self, pair: Pair, other: Pair) -> float | None:
        """Return (step time of `pair`) / (step time of `other`), or None if fewer than `ENOUGH` ratios were added.

        The result is the geometric mean of the middle half of the ratios. The smallest and the largest quarter do not
        count, because the link's speed may jump during a trial.
        """
        logs = self._logs.get((pair, other), ())
        return math.exp(middle(logs)) if len(logs) >= ENOUGH else None


def middle(values: Collection[float]) -> float:
    """Return the mean of the middle half of the values; of all values if there are fewer than four."""
    quarter = len(values) // 4
    return statistics.fmean(sorted(values)[quarter : len(values) - quarter])


# Numbers of steps of a trial: first SETTLING steps that do not count (the first still belongs to the previous trial,
# and the second differs from later ones), then TRIAL steps that count.
SETTLING, TRIAL = 2, 4
# Limits of a pair's step time, divided by the best step time. Up to TIE, a pair is as good as the best; of such pairs,
# the pair in use is kept, or else the densest is chosen. Up to HARDLY_WORSE, the pair in use is not replaced by a
# sparser pair. Up to NEAR, a pair is tried again while another pair is in use.
TIE, HARDLY_WORSE, NEAR = 1.02, 1.05, 1.3
# If the trials before and after a trial differ by more than this ratio, the link's speed jumped, so the trial is void.
JUMP = 1.5


class StepSeconds(NamedTuple):
    """The times of one training step; each is the longest on any rank.

    Attributes:
        step_s: seconds from the end of the previous step's exchange to the end of this step's exchange.
        computing_s: seconds from the end of the previous step's exchange until backward has finished the last bucket.
        wire_s: seconds in which the communication thread sent messages or waited for them.
    """

    step_s: float
    computing_s: float
    wire_s: float


class Ranking:
    """Ranks the compressor-collective pairs of a series of trials (a few training steps each) by their step times.

    Args:
        order: all pairs, from dense to sparse.
        dense: the pair of compressor `bf16`, which is tried more often than others so that noise does not exclude it.

    Attributes:
        pairs: the pairs that were tried, in the order of their first trials.
        latest: the pair of the last trial.
        leader: the fastest pair so far, or a pair whose step time is at most `TIE` times as long.
    """

    latest: Pair
    leader: Pair

    def __init__(self, order: Sequence[Pair], dense: Pair) -> None:
        self.pairs: list[Pair] = []
        self._order, self._dense = order, dense
        self._trials: list[tuple[Pair, Sequence[StepSeconds]]] = []
        self._logs_of: dict[tuple[Pair, Pair], list[float]] = {}

    def add(self, pair: Pair, taken: Sequence[StepSeconds]) -> None:
        """Add the step times of a trial.

        Args:
            pair: the compressor-collective pair that was tried.
            taken: times of the trial's steps, without the first `SETTLING` steps, which do not count.
        """
        self._trials.append((pair, taken))
        self.latest = pair
        if not self.pairs:
            self.leader = pair
        if pair not in self.pairs:
            self.pairs.append(pair)

    def compare(self, *, whatever: bool = False) -> bool:
        """Compare the second last trial with the trials right before and after it, which used another pair.

        If the times of these two other trials differ by more than the factor `JUMP`, the link's speed has jumped.

        Args:
            whatever: True to compare even if the link's speed has jumped.

        Returns:
            True; False if nothing was compared, because the link's speed has jumped.
        """
        (_, before), (pair, between), (other, after) = self._trials[-3:]
        low, high = sorted((medians(before).step_s, medians(after).step_s))
        if high > JUMP * low and not whatever:
            return False
        # the geometric mean of the times before and after corrects for a slow drift
        log = math.log(medians(between).step_s) - math.log(low * high) / 2
        self._logs_of.setdefault((pair, other), []).append(log)
        fastest = next(iter(self._logs()))
        if TIE * self.ratio(fastest, self.leader) < 1:
            self.leader = fastest
        return True

    def ratio(self, pair: Pair, other: Pair) -> float:
        """Return (step time of `pair`) / (step time of `other`), from all comparisons, also with other pairs."""
        logs = self._logs()
        return math.exp(logs[pair] - logs[other])

    def of(self, pair: Pair) -> list[StepSeconds]:
        """Return the times of the steps in all trials of a pair, oldest first; steps that do not count are left out."""
        return [seconds for who, taken in self._trials if who == pair for seconds in taken]

    def latest_s(self, pair: Pair) -> float:
        """Return the median step time, in seconds, of the last trial of this compressor-collective pair."""
        return medians(next(taken for who, taken in reversed(self._trials) if who == pair)).step_s

    def lost_s(self, winner: Pair) -> float:
        """Return the seconds that all trials cost: their time minus that of as many steps with the pair `winner`."""
        logs = self._logs()
        return math.fsum(
            (SETTLING + len(taken)) * medians(taken).step_s * (1 - math.exp(logs[winner] - logs[pair]))
            for pair, taken in self._trials
        )

    def ahead(self, racing: Sequence[Pair], close: float, field: int) -> list[Pair]:
        """Return the fastest pair so far, `leader`, then the other pairs that are worth another trial, fastest first.

        Args:
            racing: the compressor-collective pairs to choose from.
            close: a pair is worth a trial if its step time is at most this many times that of the leader.
            field: largest number of pairs to return; the pair of `bf16` may be returned in addition.
        """
        logs = self._logs()
        fastest = sorted(racing, key=lambda pair: (pair != self.leader, logs[pair]))
        near = [pair for pair in fastest if logs[pair] <= math.log(close) + logs[self.leader]]
        return [pair for pair in near if pair in near[:field] or pair == self._dense]

    def winner(self, racing: Sequence[Pair], held: Pair | None) -> Pair:
        """Return the pair in use if it is as good as the fastest pair, otherwise the densest pair that is as good.

        A pair is as good if its step time is at most `TIE` times that of the fastest pair. A sparser pair replaces the
        pair in use only if the step time of the pair in use is more than `HARDLY_WORSE` times that of the fastest. A
        dense pair that is as good as the fastest replaces a sparse pair in use.

        Args:
            racing: the compressor-collective pairs to choose from.
            held: the pair in use; None if no pair has been chosen yet.
        """
        logs, rank = self._logs(), self._order.index
        best = min(logs[pair] for pair in racing)
        winner = min((pair for pair in racing if logs[pair] <= math.log(TIE) + best), key=rank)
        if held is None or held not in racing or rank(winner) <= rank(self._dense) < rank(held):
            return winner
        patience = HARDLY_WORSE if rank(held) < rank(winner) else TIE
        return held if logs[held] <= math.log(patience) + best else winner

    def rivals(self, holder: Pair) -> list[Challenger]:
        """Return the compressor-collective pairs to try again while the pair `holder` is in use.

        There are at most two: the fastest other pair, if its step time is at most `NEAR` times as long as that of
        `holder`, and the pair that was tried first, because its estimated cost was lowest.
        """
        others = [pair for pair in self._logs() if pair != holder]
        near = [pair for pair in others[:1] if self.ratio(pair, holder) <= NEAR]
        favourite = [pair for pair in self.pairs[:1] if pair not in (holder, *near)]
        return [Challenger(pair=pair, is_near=pair in near) for pair in near + favourite]

    def summary(self, winner: Pair) -> str:
        """Return a summary for users, such as "12 ms a step, bf16 on ring 15 ms, 4 pairs tried".

        The first time is that of `winner`; the second time is that of the next fastest pair.
        """
        step_s = medians(self.of(winner)).step_s
        if (second := next((pair for pair in self._logs() if pair != winner), None)) is None:
            return f"{ms(step_s)} a step, no other pair was worth a trial"
        next_s = step_s * self.ratio(second, winner)
        return f"{ms(step_s)} a step, {second} {ms(next_s)}, {len(self.pairs)} pairs tried"

    def _logs(self) -> dict[Pair, float]:
        """Return log(step time) + a common constant for each compressor-collective pair tried, fastest first.

        The logarithms are fitted to the ratios of all comparisons by least squares; ratios leave the constant open.
        """
        signs, logs = np.zeros((len(self._logs_of), len(self.pairs))), np.zeros(len(self._logs_of))
        for row, ((pair, other), compared) in enumerate(self._logs_of.items()):
            weight = math.sqrt(len(compared))
            signs[row, self.pairs.index(pair)], signs[row, self.pairs.index(other)] = weight, -weight
            logs[row] = weight * middle(compared)
        solved, *_ = np.linalg.lstsq(signs, logs, rcond=None)
        return dict(sorted(zip(self.pairs, solved.tolist(), strict=True), key=lambda entry: entry[1]))


def medians(taken: Sequence[StepSeconds]) -> StepSeconds:
    """Return the median step time, computing time and message time of some steps."""
    return StepSeconds(*map(statistics.median, zip(*taken, strict=True)))


def ms(seconds: float) -> str:
    """Return seconds as text in milliseconds, such as "12.3 ms"."""
    return f"{1000 * seconds:.3g} ms"
