"""Chooser: tries compressor-collective pairs during training, keeps the fastest, and watches the network link's speed.

A trial is a few consecutive training steps with one pair. A state of the link is a period in which messages take about
as long as when the link was measured. If the link returns to an earlier state, the pair that was the fastest in that
state is used again without trials.

`Chooser.decisions` is a generator: every `yield` lets one step pass, and returns the times of the previous step. All
ranks get the same times, so all ranks make the same decisions.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import NamedTuple

from collectives.base import Collective
from collectives.transport.base import Transport
from compressors.auto.candidates import TRIED, Candidates, MessageCost, measure_link
from compressors.auto.choice import FIRST, Choice, ChosenPairs, Pair
from compressors.auto.ranking import (
    LONGEST_REST,
    SETTLING,
    TIE,
    TRIAL,
    Challenger,
    PairwiseRatios,
    Ranking,
    StepSeconds,
    medians,
    ms,
)
from compressors.layer import Layer, Step

# Two states of the link count as the same if messages take at most this many times as long in one as in the other.
SAME_STATE = 1.5
# The link is measured again if steps take this many times as long as when it was measured.
SLOWED = 1.25
# A trial ends early if its first step that counts takes this many times as long as a step of the previous trial.
HOPELESS = 2.5
# A trial is repeated if the link's speed jumped during it, but a trial is made at most this many times.
ATTEMPTS = 3
# A pair is tried if its shortest possible step takes at most this many times as long as a step of the best pair.
WORTH_A_TRIAL = 1.1
# Limits for a pair's second trial, its third, and so on: (step time / step time of the fastest pair, number of pairs).
# Single steps differ by a fifth if ranks share cores, so a few steps exclude only pairs that are much slower.
RACE = ((1.3, 5), (1.2, 3), *[(1.1, 2)] * 3)
# Numbers of steps whose medians are compared: the first USUAL steps after the choice, and the latest WINDOW steps.
USUAL, WINDOW = 32, 15
# The link is measured again if messages take DEPARTURE times as long as after the choice, or 1 / DEPARTURE times, or if
# a step takes SLOWER times as long. If a step takes FAR_SLOWER times as long, the link is measured at once, and pairs
# are tried even if the budget is spent.
DEPARTURE, SLOWER, FAR_SLOWER = 2.0, 1.5, 2.5
# A change of the time of messages is ignored if it is smaller than this share of a step.
NOTICEABLE = 0.05
# Number of steps until pairs may be tried again; doubled each time that the same pair wins.
REST = 64
# After PERIOD times that number of steps, pairs are tried again even if no change was noticed.
PERIOD = 8
# Before trials, the compressors encode gradients again if they last did so more than this many steps ago.
LOOK_AGAIN = 500


@dataclasses.dataclass(kw_only=True, eq=False)
class LinkKnowledge:
    """The results of trials in one state of the network link, that is, while messages take about the same time.

    Attributes:
        link: the measured speed of the link in this state.
        holder: the compressor-collective pair in use in this state.
        why: the reason for this pair, as a phrase.
        was_tried: True if trials in this state chose the pair; False if the pair was kept from the previous state, or
            if the link changed during the trials.
        rivals: other pairs that may be faster; they are tried again while `holder` is in use.
        pairwise: results of single trials of rivals in this state.
        usual: times of the first `USUAL` steps with the pair in use.
        watched: number of steps with the pair in use, without the steps of trials.
    """

    link: MessageCost
    holder: Pair
    why: str
    was_tried: bool
    rivals: list[Challenger]
    pairwise: PairwiseRatios = dataclasses.field(default_factory=PairwiseRatios)
    usual: list[StepSeconds] = dataclasses.field(default_factory=list)
    watched: int = 0


class Occasion(NamedTuple):
    """A reason to measure the speed of the network link again.

    Attributes:
        why: the reason, as a phrase.
        is_urgent: True if pairs are tried even if the option `budget` allows no more trials.
    """

    why: str
    is_urgent: bool = False


# Every `yield` lets one step pass and returns the times of the previous step.
Decisions = Generator[None, StepSeconds, None]


class Chooser:
    """Decides which compressor-collective pair sends each layer, and makes the reducer use the pair.

    All ranks make the same decisions.

    Args:
        reducer: sends each layer by the pair that was chosen for the layer.
        collective: the run's collective.
        layers: every trainable parameter.
        transport: connects the ranks; used between steps.
        error, budget, revise: the options of `Auto`.

    Attributes:
        step: the last step that has ended; None before the first step. The caller sets it before it resumes the
            generator.
        was_skipped: True if the last step was skipped because a gradient was not finite; the caller sets it.
    """

    def __init__(
        self,
        reducer: ChosenPairs,
        collective: Collective,
        layers: Sequence[Layer],
        transport: Transport,
        *,
        error: float,
        budget: float,
        revise: bool,
    ) -> None:
        self.step: Step | None = None
        self.was_skipped = False
        self._budget, self._revise = budget, revise
        self._reducer = reducer
        self._transport = transport
        self._candidates = Candidates(collective, layers, transport.world_size, error)
        self._elapsed_s = self._lost_s = 0.0
        self._rest, self._tried_at = REST, 0
        self._found: list[LinkKnowledge] = []

    @property
    def next_step(self) -> int:
        """Return the index of the first step to which a decision made now applies."""
        return 0 if self.step is None else self.step.index + 1

    def decisions(self) -> Decisions:
        """Return a generator that tries compressor-collective pairs and watches the network link until training ends.

        Each `yield` lets one training step pass, and returns the times of the previous step.
        """
        occasion = Occasion("the first steps")
        looked: int | None = None
        latest: LinkKnowledge | None = None
        while self._transport.world_size > 1:
            if self._candidates.have_changed(self.step):
                self._found.clear()
                looked = None
            if looked is None or self.next_step - looked > LOOK_AGAIN:  # a change of the link does not affect gradients
                # If the step was skipped, its gradients were replaced with zeros, so wait for another step.
                while self._reducer.look is None or self.was_skipped:
                    self._candidates.forget_gradients()
                    self._reducer.look = self._candidates.look_at
                    yield
                self._reducer.look = None
                self._candidates.agree(self._transport)
                looked = self.next_step
            self._measure_link()
            known = self._known()
            may_try = occasion.is_urgent or (self._can_afford() and self.next_step - self._tried_at > self._rest)
            if known is not None and known is not latest and (known.was_tried or not may_try):
                latest = self._recall(known, occasion.why)
            elif latest is None or may_try:
                latest = yield from self._contest(occasion.why)
            elif known is None:  # the link is in a new state, but trials must wait
                rivals = [Challenger(pair=rival.pair, is_near=rival.is_near) for rival in latest.rivals]
                latest = LinkKnowledge(
                    link=self._candidates.link, holder=latest.holder, why=latest.why, was_tried=False, rivals=rivals
                )
                self._found.append(latest)
            else:
                latest.usual.clear()  # the link has not changed, but the step time has
            if not self._revise:
                return
            occasion = yield from self._watch(latest)

    def follow(self, choices: Iterable[Choice], *, goes_on: bool = False) -> Decisions:
        """Return a generator like that of `decisions`, which repeats earlier choices, each at its own training step.

        Args:
            choices: choices of an earlier run, in the order of their steps.
            goes_on: True to try pairs and make new choices after the last of these choices.
        """
        for choice in choices:
            while self.next_step < choice.step:
                yield
            self._reducer.switch(choice)
        if goes_on:
            yield from self.decisions()

    def _measure_link(self) -> None:
        self._candidates.link = measure_link(self._reducer.bound(self._candidates.dense).collective, self._transport)

    def _known(self) -> LinkKnowledge | None:
        """Return the results of earlier trials at about the link's current speed; None if there were none."""
        nearest = min(self._found, key=self._cost_ratio, default=None)
        return nearest if nearest is not None and self._cost_ratio(nearest) <= SAME_STATE else None

    def _cost_ratio(self, found: LinkKnowledge) -> float:
        negligible_s = NOTICEABLE * medians(found.usual).step_s if found.usual else 0.0
        return self._candidates.cost_ratio(found.link, found.holder, negligible_s)

    def _recall(self, found: LinkKnowledge, why: str) -> LinkKnowledge:
        """Use again the pair that was in use when the link had this speed before, and return `found`.

        `found` has the results of the trials at this speed; `why` is the reason for this change, as a phrase.
        """
        self._switch(found.holder, f"after {why}, as earlier at this link speed: {found.why}")
        return found

    def _contest(self, why: str) -> Generator[None, StepSeconds, LinkKnowledge]:
        """Try the compressor-collective pairs that may be the fastest, lowest estimated cost first; use the fastest.

        If the link's speed changed during the trials, and earlier trials were made at the new speed, the earlier trials
        decide.

        Args:
            why: the reason for the trials, as a phrase.

        Returns:
            The results of trials at the speed that the link has after the trials.
        """
        parts, choices, began_on = self._reducer.choice.parts, self._candidates.choices(), self._candidates.link
        numel = {layer.id: layer.numel for layer in self._candidates.layers}
        most_used = max(parts, key=lambda part: sum(numel.get(layer_id, 0) for layer_id in part.layers))
        held = None if any(part.why == FIRST for part in parts) else most_used.pair
        cheapest, *others = sorted(choices, key=lambda pair: self._candidates.cost_s(choices[pair]))
        ranking = Ranking(self._candidates.pairs, self._candidates.dense)
        ranking.add(cheapest, (yield from self._measure(choices[cheapest])))
        priced_s = ranking.latest_s(cheapest)
        for pair in others:
            if (now_s := ranking.latest_s(ranking.leader)) > SLOWED * priced_s:
                self._measure_link()  # the link has become slow, so a dense pair could now take seconds per step
                priced_s = now_s
            # A step takes at least the time of computing, which is all if messages overlap with it completely.
            computing_s = min(medians(ranking.of(each)).computing_s for each in ranking.pairs)
            least_s = max(computing_s, self._candidates.cost_s(choices[pair]))
            if least_s <= WORTH_A_TRIAL * ranking.latest_s(ranking.leader):
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
        found = LinkKnowledge(
            link=began_on,
            holder=winner,
            why=f"after {why}: {ranking.summary(winner)}",
            was_tried=True,
            rivals=ranking.rivals(winner),
            usual=ranking.of(winner)[-USUAL:],
        )
        self._measure_link()
        if self._cost_ratio(found) > SAME_STATE:  # the link changed during the trials
            found.link, found.was_tried = self._candidates.link, False
            found.usual.clear()
        known = self._known()
        if known is not None and known.was_tried and not found.was_tried:
            return self._recall(known, why)
        self._switch(winner, found.why)
        if known is not None:
            found.pairwise = known.pairwise
            self._found.remove(known)
        for rival in found.rivals:  # consecutive trials are not independent, so they count as one result
            found.pairwise.add(rival.pair, winner, ranking.ratio(rival.pair, winner))
        self._found.append(found)
        return found

    def _compare(
        self, pair: Pair, ranking: Ranking, choices: Mapping[Pair, Choice]
    ) -> Generator[None, StepSeconds, None]:
        """Try a pair between two trials of the fastest pair so far; repeat this if the link's speed jumped meanwhile.

        Args:
            pair: the compressor-collective pair to try.
            ranking: gets the step times of all these trials.
            choices: for each pair, the choice to use during its trials.
        """
        leader = ranking.leader
        trials = [pair, leader] if ranking.latest == leader else [leader, pair, leader]
        for attempts_left in reversed(range(ATTEMPTS)):
            for each in trials:
                hopeless_s = HOPELESS * ranking.latest_s(ranking.latest)
                ranking.add(each, (yield from self._measure(choices[each], hopeless_s)))
            if ranking.compare(whatever=not attempts_left):
                break
            trials = [pair, leader]

    def _measure(self, choice: Choice, hopeless_s: float = math.inf) -> Generator[None, StepSeconds, list[StepSeconds]]:
        """Train a few steps with a choice, and return the times of the last `TRIAL` of these steps.

        Args:
            choice: the compressor-collective pair of every layer in these steps.
            hopeless_s: end the trial early after a step that takes longer than this many seconds.
        """
        if choice.pair_of != self._reducer.choice.pair_of:
            self._reducer.switch(Choice(step=self.next_step, parts=choice.parts))
        taken: list[StepSeconds] = []
        while len(taken) <= SETTLING or (len(taken) < SETTLING + TRIAL and taken[-1].step_s <= hopeless_s):
            taken.append((yield))
        self._elapsed_s += sum(seconds.step_s for seconds in taken)
        return taken[SETTLING:]

    def _watch(self, found: LinkKnowledge) -> Generator[None, StepSeconds, Occasion]:
        """Let steps pass until the link's speed seems to have changed or new trials are due; return the reason.

        Meanwhile, rivals (pairs that may be faster than the pair in use) are tried now and then.

        Args:
            found: the results of trials at the current speed; if a rival is faster, it becomes `found.holder`.
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
            usual, now = medians(found.usual), medians(recent)
            change = _change(usual, now)
            if self._candidates.have_changed(self.step):
                return Occasion("sparse compressors began to send fewer entries", is_urgent=True)
            if now.step_s > FAR_SLOWER * usual.step_s:
                return Occasion(change, is_urgent=True)
            if count > REST and change:
                return Occasion(change)
            if count > PERIOD * self._rest and self._can_afford():
                return Occasion(f"{count} steps")
            may_try = (each for each in found.rivals if each.is_near or self._can_afford())
            due = next((each for each in may_try if found.watched >= each.due), None)
            if due is None or change:  # after a change, a trial would say nothing about this state of the link
                continue
            outcome = yield from self._rival_ratio(due.pair, medians(list(recent)[-TRIAL:]).step_s)
            found.pairwise.add(due.pair, found.holder, outcome)
            if self._can_afford() and SLOWER * outcome < 1:
                return Occasion(f"steps of {due.pair} took {outcome:.3g} times as long as those of {found.holder}")
            ratio = found.pairwise.ratio(due.pair, found.holder)
            due.schedule_after(found.watched, ratio or outcome)
            if ratio and TIE * ratio <= 1:
                found.why = f"in trials of both, steps took {ratio:.3g} times as long as with {found.holder}"
                self._switch(due.pair, found.why)
                found.holder, due.pair, due.is_near = due.pair, found.holder, True
                found.usual.clear()
                recent.clear()
        raise AssertionError

    def _can_afford(self) -> bool:
        return self._lost_s <= self._budget * self._elapsed_s

    def _rival_ratio(self, rival: Pair, before_s: float) -> Generator[None, StepSeconds, float]:
        """Try a rival between steps of the pair in use; return (the rival's step time) / (that of the pair in use).

        Args:
            rival: the compressor-collective pair to try.
            before_s: median time, in seconds, of the last steps with the pair in use.
        """
        of_holder = self._reducer.choice
        taken = yield from self._measure(self._candidates.choice(rival), HOPELESS * before_s)
        self._reducer.switch(dataclasses.replace(of_holder, step=self.next_step))
        after_s = medians((yield from self._measure(self._reducer.choice))).step_s
        holder_s = math.sqrt(before_s * after_s)  # estimate for the time of the trial, in case the link's speed changes
        outcome = medians(taken).step_s / holder_s
        self._lost_s += (SETTLING + len(taken)) * (medians(taken).step_s - holder_s)
        return outcome

    def _switch(self, pair: Pair, why: str) -> None:
        parts = tuple(
            dataclasses.replace(part, why=why if part.why == TRIED else f"{part.why}; other layers use {pair}: {why}")
            for part in self._candidates.choice(pair).parts
        )
        self._reducer.switch(Choice(step=self.next_step, parts=parts))


def _change(usual: StepSeconds, now: StepSeconds) -> str:
    """Return a phrase about a change of step or message times that may make another pair faster; "" if none does.

    Args:
        usual: median times of the first steps with the pair in use.
        now: median times of the latest steps.
    """
    if now.step_s > SLOWER * usual.step_s:
        return f"steps went from {ms(usual.step_s)} to {ms(now.step_s)}"
    low, high = sorted((now.wire_s, usual.wire_s))
    if high > DEPARTURE * low and high - low > NOTICEABLE * usual.step_s:
        return f"messages went from {ms(usual.wire_s)} to {ms(now.wire_s)} a step"
    return ""
