"""Chooser: looks at gradients and link, tries pairs, keeps the fastest, and watches whether it stays so.

A link that comes back after a while is recognised, and what proved the fastest on it is held again without trials.

`Chooser.decisions` is that, as it is done: every `yield` lets one step go by and gives what the one before it took. All
ranks get the same figures, so all of them decide the same.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from collectives.base import Collective
from collectives.transport.base import Transport
from compressors.auto.candidates import TRIED, Candidates, LinkCost, measure_link
from compressors.auto.choice import FIRST, Choice, Pair, Part
from compressors.auto.compressor import Auto
from compressors.auto.ranking import (
    LONGEST_REST,
    SETTLING,
    TIE,
    TRIAL,
    Challenger,
    PairwiseRatios,
    Ranking,
    StepSeconds,
    ms,
    usual_s,
)
from compressors.auto.reducer import ChosenPairs
from compressors.layer import Layer, Step

ALIKE = 1.5
"""ratio of what messages take on two links, up to which they are one to a choice"""
SLOWED = 1.25
"""times what steps took when the link was measured, from which that is done again"""
HOPELESS = 2.5
"""times a step of the turn before, from which one step of a pair is enough"""
ATTEMPTS = 3
"""at a turn while which the link does not jump"""
WORTH_A_TRIAL = 1.1
"""times the best, up to which a pair is tried"""
RACE = ((1.3, 5), (1.2, 3), *[(1.1, 2)] * 3)
"""(times the best, how many), up to which pairs have a second turn, a third, and so on: single steps differ by a fifth
where ranks share cores, so that few of them drop only what is far behind"""
USUAL, WINDOW = 32, 15
"""steps whose medians are held against each other, around the choice and now: those of fewer differ by chance"""
DEPARTURE, SLOWER, FAR_SLOWER = 2.0, 1.5, 2.5
"""ratios of the time on the link, and of the whole step's, to what it was after the choice, at which it is made again;
above the last one at once, whatever trials have cost"""
NOTICEABLE = 0.05
"""of a step: a smaller change of the time on the link changes nothing"""
REST = 64
"""steps until pairs may be tried again; doubled as long as the same one wins"""
PERIOD = 8
"""rests after which pairs are tried again though nothing seems to have changed"""
LOOK_AGAIN = 500
"""steps since gradients were looked at, after which that is done anew when pairs are tried"""


@dataclasses.dataclass(kw_only=True, eq=False)
class Found:
    """What is known of the pairs on a link.

    Attributes:
        link: as it was then.
        holder: what is held on such a link.
        why: that one.
        was_tried: against others, and not merely held on to when the link became like this.
        rivals: that may be better.
        duels: on such links.
        usual: the first steps of what is held there.
        watched: steps on such links, turns of others aside.
    """

    link: LinkCost
    holder: Pair
    why: str
    was_tried: bool
    rivals: list[Challenger]
    duels: PairwiseRatios = dataclasses.field(default_factory=PairwiseRatios)
    usual: list[StepSeconds] = dataclasses.field(default_factory=list)
    watched: int = 0


class Occasion(NamedTuple):
    """Why to look at the link again, and whether trials must not wait until they can be afforded."""

    why: str
    is_urgent: bool = False


Decisions = Generator[None, StepSeconds, None]


class Chooser:
    """Decides for one rank as for all others.

    Args:
        auto: the options.
        reducer: that does what is chosen.
        collective: the run's.
        layers: every trainable parameter.
        transport: among the ranks; used between steps.

    Attributes:
        step: the one that ended last; None before the first.
        was_skipped: whether that one was left out, for a gradient was not finite.
    """

    def __init__(
        self, auto: Auto, reducer: ChosenPairs, collective: Collective, layers: Sequence[Layer], transport: Transport
    ) -> None:
        self.step: Step | None = None
        self.was_skipped = False
        self._auto = auto
        self._reducer = reducer
        self._transport = transport
        self._candidates = Candidates(auto, collective, layers, transport.world_size)
        self._elapsed_s = self._lost_s = 0.0
        self._rest, self._tried_at = REST, 0
        self._found: list[Found] = []

    @property
    def next_step(self) -> int:
        """Index of the step for which a decision would hold."""
        return 0 if self.step is None else self.step.index + 1

    def decisions(self) -> Decisions:
        """Look, try and watch, for as long as there are steps."""
        occasion = Occasion("the first steps")
        looked: int | None = None
        latest: Found | None = None
        while self._transport.world_size > 1:
            if self._have_candidates_changed():
                self._found.clear()
                looked = None
            if looked is None or self.next_step - looked > LOOK_AGAIN:  # what a link does changes no gradient
                yield from self._look()
                looked = self.next_step
            self._measure_link()
            known = self._known()
            may_try = occasion.is_urgent or (self._can_afford() and self._is_rested())
            if known is not None and known is not latest and (known.was_tried or not may_try):
                latest = self._recall(known, occasion.why)
            elif latest is None or may_try:
                latest = yield from self._contest(occasion.why)
            elif known is None:
                latest = self._hold_on(latest)
            else:
                latest.usual.clear()  # the link is what it was, and yet steps take another time
            if not self._auto.revise:
                return
            occasion = yield from self._watch(latest)

    def follow(self, choices: Iterable[Choice]) -> Decisions:
        """Do what was chosen before, at the same steps."""
        for choice in choices:
            while self.next_step < choice.step:
                yield
            self._reducer.switch(choice)

    def _look(self) -> Decisions:
        """Have the compressors encode the next step's gradients beside what is sent; the worst of all ranks counts."""
        while self._reducer.look is None or self.was_skipped:  # zeros in the place of NaN say nothing
            self._candidates.forget_gradients()
            self._reducer.look = self._candidates.look_at
            yield
        self._reducer.look = None
        self._candidates.agree(self._transport)

    def _have_candidates_changed(self) -> bool:
        return self.step is not None and self._candidates.have_changed(self.step)

    def _measure_link(self) -> None:
        dense = self._reducer.collective_of(self._candidates.dense)
        self._candidates.link = measure_link(dense, self._transport)

    def _known(self) -> Found | None:
        """What is known of the link most like the one now, if there was such a link."""
        nearest = min(self._found, key=self._unlikeness, default=None)
        return nearest if nearest is not None and self._unlikeness(nearest) <= ALIKE else None

    def _unlikeness(self, found: Found) -> float:
        negligible_s = NOTICEABLE * usual_s(found.usual) if found.usual else 0.0
        return self._candidates.unlikeness(found.link, found.holder, negligible_s)

    def _recall(self, found: Found, why: str) -> Found:
        """Hold again what was held on such a link."""
        self._switch(found.holder, f"after {why}, to a link that is known: {found.why}")
        return found

    def _hold_on(self, before: Found) -> Found:
        """Keep what was held on the link before: trials on a new one must wait."""
        rivals = [Challenger(pair=rival.pair, is_near=rival.is_near) for rival in before.rivals]
        link = self._candidates.link
        self._found.append(Found(link=link, holder=before.holder, why=before.why, was_tried=False, rivals=rivals))
        return self._found[-1]

    def _contest(self, why: str) -> Generator[None, StepSeconds, Found]:
        """Try the pairs that may be the fastest, cheapest first, and hold the one that is.

        Where the link became another one meanwhile, what is known of that counts for more.
        """
        held, choices, began_on = self._main_pair(), self._candidates.choices(), self._candidates.link
        cheapest, *others = sorted(choices, key=lambda pair: self._cost_s(choices[pair]))
        ranking = Ranking(self._candidates.pairs, self._candidates.dense)
        ranking.add(cheapest, (yield from self._measure(choices[cheapest])))
        priced_s = ranking.latest_s(cheapest)
        for pair in others:
            if (now_s := ranking.latest_s(ranking.leader)) > SLOWED * priced_s:
                self._measure_link()  # it was fast a moment ago, and a dense pair would take seconds a step
                priced_s = now_s
            if self._is_worth_a_trial(choices[pair], ranking):
                yield from self._compare(pair, ranking, choices)
        racing = ranking.pairs
        for close, field in RACE:
            racing = ranking.ahead(racing, close, field)
            for pair in racing:
                if pair != ranking.leader:
                    yield from self._compare(pair, ranking, choices)
        winner = ranking.winner(racing, held)
        self._lost_s += ranking.lost_s(winner)
        self._rest = REST if winner != held else min(LONGEST_REST, 2 * self._rest)
        self._tried_at = self.next_step
        found = Found(
            link=began_on,
            holder=winner,
            why=f"after {why}: {ranking.ranking(winner)}",
            was_tried=True,
            rivals=ranking.rivals(winner),
            usual=ranking.of(winner)[-USUAL:],
        )
        self._measure_link()
        if self._unlikeness(found) > ALIKE:  # turns on one link and on another
            found.link, found.was_tried = self._candidates.link, False
            found.usual.clear()
        known = self._known()
        if known is not None and known.was_tried and not found.was_tried:
            return self._recall(known, why)
        self._switch(winner, found.why)
        if known is not None:
            found.duels = known.duels
            self._found.remove(known)
        for rival in found.rivals:  # a contest counts once: its turns followed each other
            found.duels.add(rival.pair, winner, ranking.ratio(rival.pair, winner))
        self._found.append(found)
        return found

    def _compare(
        self, pair: Pair, ranking: Ranking, choices: Mapping[Pair, Choice]
    ) -> Generator[None, StepSeconds, None]:
        """A turn for a pair between two of the leader; again, where the link jumped meanwhile."""
        leader = ranking.leader
        turns = [pair, leader] if ranking.latest == leader else [leader, pair, leader]
        for attempts_left in reversed(range(ATTEMPTS)):
            for each in turns:
                hopeless_s = HOPELESS * ranking.latest_s(ranking.latest)
                ranking.add(each, (yield from self._measure(choices[each], hopeless_s)))
            if ranking.compare(whatever=not attempts_left):
                break
            turns = [pair, leader]

    def _measure(self, choice: Choice, hopeless_s: float = math.inf) -> Generator[None, StepSeconds, list[StepSeconds]]:
        """What steps take under a choice; no more of them after one that takes longer than `hopeless_s`."""
        if choice.ways != self._reducer.choice.ways:
            self._reducer.switch(Choice(step=self.next_step, parts=choice.parts))
        taken: list[StepSeconds] = []
        while len(taken) <= SETTLING or (len(taken) < SETTLING + TRIAL and taken[-1].step_s <= hopeless_s):
            seconds = yield
            taken.append(seconds)
        self._elapsed_s += sum(seconds.step_s for seconds in taken)
        return taken[SETTLING:]

    def _watch(self, found: Found) -> Generator[None, StepSeconds, Occasion]:
        """Let steps go by until the link seems to have changed or time is up.

        Args:
            found: on this link; another pair is held from where it proves better.
        """
        recent: collections.deque[StepSeconds] = collections.deque(maxlen=WINDOW)
        for count in itertools.count(1):
            seconds = yield
            found.watched += 1
            self._elapsed_s += seconds.step_s
            recent.append(seconds)
            if len(found.usual) < USUAL:
                found.usual.append(seconds)
            if len(recent) < WINDOW:
                continue
            usual, now = _median(found.usual), _median(recent)
            if occasion := self._occasion(count, usual, now):
                return occasion
            due = next((each for each in found.rivals if found.watched >= each.due and self._may_duel(each)), None)
            if due is None or _change(usual, now):  # of another link, it would tell nothing of this one
                continue
            outcome = yield from self._duel(found.holder, due.pair, usual_s(list(recent)[-TRIAL:]))
            found.duels.add(due.pair, found.holder, outcome)
            if self._can_afford() and SLOWER * outcome < 1:
                return Occasion(f"steps of {due.pair} took {outcome:.3g} times those of {found.holder}")
            ratio = found.duels.ratio(due.pair, found.holder)
            due.had_a_turn(found.watched, ratio or outcome)
            if ratio and TIE * ratio <= 1:
                found.why = f"after turns of both, steps took {ratio:.3g} times those with {found.holder}"
                self._switch(due.pair, found.why)
                found.holder, due.pair, due.is_near = due.pair, found.holder, True
                found.usual.clear()
                recent.clear()
        raise AssertionError

    def _occasion(self, count: int, usual: StepSeconds, now: StepSeconds) -> Occasion | None:
        """What speaks for another look at the link, if anything does.

        Args:
            count: steps since the one before.
            usual: a step as they were on this link.
            now: a step of late.
        """
        if self._have_candidates_changed():
            return Occasion("sparse pairs became sparser", is_urgent=True)
        if now.step_s > FAR_SLOWER * usual.step_s:
            return Occasion(_change(usual, now), is_urgent=True)
        if count > REST and (change := _change(usual, now)):
            return Occasion(change)
        if count > PERIOD * self._rest and self._can_afford():
            return Occasion(f"{count} steps")
        return None

    def _is_rested(self) -> bool:
        return self.next_step - self._tried_at > self._rest

    def _may_duel(self, rival: Challenger) -> bool:
        return rival.is_near or self._can_afford()

    def _can_afford(self) -> bool:
        return self._lost_s <= self._auto.budget * self._elapsed_s

    def _duel(self, holder: Pair, rival: Pair, before_s: float) -> Generator[None, StepSeconds, float]:
        """A turn for another pair, between steps of the one held; how many times as long its steps took.

        Args:
            holder: the one held.
            rival: the other.
            before_s: what the last steps took.
        """
        of_holder = self._reducer.choice
        taken = yield from self._measure(self._candidates.choice(rival), HOPELESS * before_s)
        self._reducer.switch(dataclasses.replace(of_holder, step=self.next_step))
        after_s = usual_s((yield from self._measure(self._reducer.choice)))
        holder_s = math.sqrt(before_s * after_s)  # in the middle of the turn, if a link becomes slower or faster
        outcome = usual_s(taken) / holder_s
        self._lost_s += (SETTLING + len(taken)) * (usual_s(taken) - holder_s)
        return outcome

    def _is_worth_a_trial(self, choice: Choice, ranking: Ranking) -> bool:
        """Whether steps could be about as short as the shortest, if all messages went beside computing."""
        least_s = max(ranking.computing_s(), self._cost_s(choice))
        return least_s <= WORTH_A_TRIAL * ranking.latest_s(ranking.leader)

    def _cost_s(self, choice: Choice) -> float:
        return self._candidates.cost_s(choice, self._candidates.link)

    def _switch(self, pair: Pair, why: str) -> None:
        """Hold a pair, and say why."""
        parts = []
        for part in self._candidates.choice(pair).parts:
            reason = why if part.why == TRIED else f"{part.why}; else {pair}: {why}"
            parts.append(Part(pair=part.pair, layers=part.layers, why=reason))
        self._reducer.switch(Choice(step=self.next_step, parts=tuple(parts)))

    def _main_pair(self) -> Pair | None:
        """What most elements go through; None before anything was chosen."""
        parts = self._reducer.choice.parts
        if any(part.why == FIRST for part in parts):
            return None
        numel = {layer.id: layer.numel for layer in self._candidates.layers}
        return max(parts, key=lambda part: sum(numel.get(layer_id, 0) for layer_id in part.layers)).pair


def _change(usual: StepSeconds, now: StepSeconds) -> str:
    """What changed so much that another pair may be better, in words; empty where nothing did."""
    if now.step_s > SLOWER * usual.step_s:
        return f"steps went from {ms(usual.step_s)} to {ms(now.step_s)}"
    low, high = sorted((now.wire_s, usual.wire_s))
    if high > DEPARTURE * low and high - low > NOTICEABLE * usual.step_s:
        return f"messages went from {ms(usual.wire_s)} to {ms(now.wire_s)} a step"
    return ""


def _median(taken: Sequence[StepSeconds]) -> StepSeconds:
    """Of each figure by itself."""
    return StepSeconds(*map(statistics.median, zip(*taken, strict=True)))
