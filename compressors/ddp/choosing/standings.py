"""Standings: what steps took under each pair in a contest, and which pairs that puts ahead."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from compressors.choice import Pair
from compressors.ddp.choosing.duels import Rival

TRIAL = 4
"""steps of a pair that count, in each of its turns"""
TIE, HARDLY_WORSE, NEAR = 1.02, 1.05, 1.3
"""times the best, up to which: a pair is as good (the densest is chosen then), what was held does not give way to a
sparser one, and a pair is worth duels while another is held"""


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


class Standings:
    """Adds up turns.

    Args:
        pairs: all that there are, from dense to sparse.
        dense: the one that must not lose by chance.
    """

    def __init__(self, pairs: Sequence[Pair], dense: Pair) -> None:
        self._order = {pair: index for index, pair in enumerate(pairs)}
        self._dense = dense
        self._taken: dict[Pair, list[StepSeconds]] = {}

    def __len__(self) -> int:
        return len(self._taken)

    def add(self, pair: Pair, turn: Sequence[StepSeconds]) -> None:
        """Count `TRIAL` more steps of a pair."""
        self._taken.setdefault(pair, []).extend(turn)

    def of(self, pair: Pair) -> list[StepSeconds]:
        """The steps of a pair, oldest first."""
        return self._taken[pair]

    def step_s(self, pair: Pair) -> float:
        """The mean over turns of the median in each: single outliers do not count, times of long steps do."""
        taken = self._taken[pair]
        return statistics.fmean(usual_s(taken[i : i + TRIAL]) for i in range(0, len(taken), TRIAL))

    def computing_s(self) -> float:
        """The least that computing took."""
        return min(statistics.median(each.computing_s for each in taken) for taken in self._taken.values())

    def best_s(self) -> float:
        """Of the fastest pair."""
        return min(map(self.step_s, self._taken))

    def ahead(self, racing: Sequence[Pair], close: float, field: int) -> list[Pair]:
        """The fastest of those racing, and the dense one if it is no slower than `close` times them."""
        fastest = sorted(racing, key=self.step_s)
        near = [pair for pair in fastest if self.step_s(pair) <= close * self.step_s(fastest[0])]
        return [pair for pair in near if pair in near[:field] or pair == self._dense]

    def winner(self, racing: Sequence[Pair], held: Pair | None) -> Pair:
        """The densest of those that are as good as the best; what was held, if a sparser one is hardly better."""
        best_s = min(map(self.step_s, racing))
        in_order = sorted(racing, key=self._order.__getitem__)
        best = next(pair for pair in in_order if self.step_s(pair) <= TIE * best_s)
        denser = in_order[: in_order.index(best)]
        return held if held in denser and self.step_s(held) <= HARDLY_WORSE * best_s else best

    def rivals(self, holder: Pair) -> list[Rival]:
        """The pair nearest to what is held, if it is near, and the one that promised most and had the first turn."""
        others = sorted((pair for pair in self._taken if pair != holder), key=self.step_s)
        near = [pair for pair in others[:1] if self.step_s(pair) <= NEAR * self.step_s(holder)]
        favourite = [pair for pair in list(self._taken)[:1] if pair not in (holder, *near)]
        return [Rival(pair=pair, is_near=pair in near) for pair in near + favourite]

    def ranking(self, winner: Pair) -> str:
        """What the winner took, and the next best one that was tried."""
        others = sorted((pair for pair in self._taken if pair != winner), key=self.step_s)
        text = f"{ms(self.step_s(winner))} a step"
        if others:
            return f"{text}, {others[0]} {ms(self.step_s(others[0]))}, {len(self)} pairs tried"
        return f"{text}, no other pair was worth a trial"


def usual_s(taken: Sequence[StepSeconds]) -> float:
    """The median step."""
    return statistics.median(each.step_s for each in taken)


def ms(seconds: float) -> str:
    """As text."""
    return f"{1000 * seconds:.3g} ms"
