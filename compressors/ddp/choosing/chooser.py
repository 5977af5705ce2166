"""Chooser: looks at gradients and link, tries pairs, keeps the fastest, and watches whether it stays so.

`Chooser.decisions` is that, as it is done: every `yield` lets one step go by and gives what the one before it took. All
ranks get the same figures, so all of them decide the same.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import statistics
from collections.abc import Generator, Iterable, Sequence

from collectives.base import Collective
from collectives.transport.base import Transport
from compressors.auto import Auto
from compressors.choice import FIRST, Choice, Pair, Part, dense_pair, pairs_on
from compressors.ddp.bucket import Bucket
from compressors.ddp.choosing.duels import LONGEST_REST, Duels
from compressors.ddp.choosing.prices import LinkCost, Seen, exchange_s, look, measure_link
from compressors.ddp.choosing.reducer import ChosenPairs
from compressors.ddp.choosing.standings import TIE, TRIAL, Standings, StepSeconds, ms, usual_s
from compressors.layer import Layer

SMALL = 1024
"""elements; a layer of no more goes the way of most others: what it loses or costs is little"""
SETTLING = 2
"""steps after a change that are not counted: first the one before is told, then one that is not like others"""
WORTH_A_TRIAL = 1.1
"""times the best, up to which a pair is tried"""
RACE = ((1.3, 6), (1.2, 4), (1.15, 3), *[(1.1, 2)] * 4)
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
"""rests after which gradients are looked at and pairs tried again though nothing seems to have changed"""


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
        next_step: index of the step for which a decision would hold.
    """

    def __init__(
        self, auto: Auto, reducer: ChosenPairs, collective: Collective, layers: Sequence[Layer], transport: Transport
    ) -> None:
        self.next_step = 0
        self._auto = auto
        self._reducer = reducer
        self._layers = [layer for layer in layers if layer.numel]
        self._transport = transport
        self._pairs = pairs_on(collective)
        self._dense = dense_pair(collective)
        self._compressors = {pair: pair.built()[0] for pair in self._pairs}
        self._seen: dict[Pair, dict[int, Seen]] = {}
        self._buckets: list[list[Layer]] = []
        self._link = LinkCost(wave_s=0.0, byte_s=0.0)
        self._elapsed_s = self._lost_s = 0.0
        self._rest = REST
        self._duels = Duels()

    def decisions(self) -> Decisions:
        """Look, try and watch, for as long as there are steps."""
        why = "the first steps"
        while self._transport.world_size > 1:
            self._look()
            yield
            self._price()
            winner, standings = yield from self._contest(why)
            if not self._auto.revise:
                return
            why = yield from self._watch(winner, standings)

    def follow(self, choices: Iterable[Choice]) -> Decisions:
        """Do what was chosen before, at the same steps."""
        for choice in choices:
            while self.next_step < choice.step:
                yield
            self._reducer.switch(choice)

    def _look(self) -> None:
        """Have the compressors encode the next step's gradients beside what is sent."""
        self._seen = {pair: {} for pair in self._pairs}
        self._buckets = []
        self._reducer.look = self._look_at

    def _look_at(self, bucket: Bucket) -> None:
        self._buckets.append(bucket.layers)
        for layer, gradient in zip(bucket.layers, bucket.gradients, strict=True):
            x = gradient.float()
            for pair, compressor in self._compressors.items():
                self._seen[pair][layer.id] = look(compressor, layer, x, bucket.step)

    def _price(self) -> None:
        """Agree on what was seen, and measure the link."""
        self._reducer.look = None
        unseen = Seen(seconds=0.0, nbytes=0, error=0.0)
        keys = [(pair, layer.id) for pair in self._pairs for layer in self._layers]
        own = [value for pair, layer_id in keys for value in self._seen[pair].get(layer_id, unseen)]
        worst = iter(self._transport.all_reduce_scalars(own, "max"))
        for (pair, layer_id), values in zip(keys, zip(worst, worst, worst, strict=True), strict=True):
            self._seen[pair][layer_id] = Seen(*values)
        self._link = measure_link(self._reducer.collective_of(self._dense), self._transport)

    def _contest(self, why: str) -> Generator[None, StepSeconds, tuple[Pair, Standings]]:
        """Try the pairs that may be the fastest, cheapest first, and hold the one that is; it, and what steps took."""
        held, begun_s, first_step = self._main_pair(), self._elapsed_s, self.next_step
        choices = self._choices()
        cost_s = {pair: self._cost_s(choice) for pair, choice in choices.items()}
        standings = Standings(self._pairs, self._dense)
        racing: list[Pair] = []
        for pair in sorted(choices, key=cost_s.__getitem__):
            if not racing or self._is_worth_a_trial(cost_s[pair], standings):
                standings.add(pair, (yield from self._measure(choices[pair])))
                racing.append(pair)
        for close, field in RACE:
            racing = standings.ahead(racing, close, field)
            for pair in racing if len(racing) > 1 else ():
                standings.add(pair, (yield from self._measure(choices[pair])))
        winner = standings.winner(racing, held)
        with_winner_s = (self.next_step - first_step) * standings.step_s(winner)
        self._lost_s += max(0.0, self._elapsed_s - begun_s - with_winner_s)
        self._rest = REST if winner != held else min(LONGEST_REST, 2 * self._rest)
        self._switch(winner, f"after {why}: {standings.ranking(winner)}")
        return winner, standings

    def _measure(self, choice: Choice) -> Generator[None, StepSeconds, list[StepSeconds]]:
        """What steps take under a choice."""
        if choice.ways != self._reducer.choice.ways:
            self._reducer.switch(Choice(step=self.next_step, parts=choice.parts))
        taken = []
        for _ in range(SETTLING + TRIAL):
            seconds = yield
            taken.append(seconds)
        self._elapsed_s += sum(seconds.step_s for seconds in taken)
        return taken[SETTLING:]

    def _watch(self, holder: Pair, standings: Standings) -> Generator[None, StepSeconds, str]:
        """Let steps go by until the link seems to have changed or time is up; why that ended.

        Args:
            holder: the pair that is held.
            standings: of the contest that it has won.
        """
        first = standings.of(holder)[-USUAL:]
        recent: collections.deque[StepSeconds] = collections.deque(maxlen=WINDOW)
        rivals = standings.rivals(holder)
        for rival in rivals:  # that contest counts once: its turns followed each other
            self._duels.add(rival.pair, holder, standings.step_s(rival.pair) / standings.step_s(holder))
        for count in itertools.count(1):
            seconds = yield
            self._elapsed_s += seconds.step_s
            recent.append(seconds)
            if len(first) < USUAL:
                first.append(seconds)
            if len(recent) < WINDOW:
                continue
            usual, now = _median(first), _median(recent)
            can_afford = self._lost_s <= self._auto.budget * self._elapsed_s
            may_try = count > self._rest and can_afford
            if now.step_s > (SLOWER if may_try else FAR_SLOWER) * usual.step_s:
                return f"steps went from {ms(usual.step_s)} to {ms(now.step_s)}"
            if may_try and _departs(now, usual):
                return f"messages went from {ms(usual.wire_s)} to {ms(now.wire_s)} a step"
            if may_try and count > PERIOD * self._rest:
                return f"{count} steps"
            due = next((each for each in rivals if count >= each.due and (each.is_near or can_afford)), None)
            if due is None:
                continue
            outcome = yield from self._duel(holder, due.pair, usual_s(list(recent)[-TRIAL:]))
            if can_afford and SLOWER * outcome < 1:
                return f"steps of {due.pair} took {outcome:.3g} times those of {holder}"
            ratio = self._duels.ratio(due.pair, holder)
            due.had_a_turn(count, ratio or outcome)
            if ratio and TIE * ratio <= 1:
                self._switch(due.pair, f"after turns of both, steps took {ratio:.3g} times those with {holder}")
                holder, due.pair, due.is_near = due.pair, holder, True
                first = []
                recent.clear()
        raise AssertionError

    def _duel(self, holder: Pair, rival: Pair, before_s: float) -> Generator[None, StepSeconds, float]:
        """A turn for another pair, between steps of the one held; how many times as long its steps took.

        Args:
            holder: the one held.
            rival: the other.
            before_s: what the last steps took.
        """
        of_holder = self._reducer.choice
        rival_s = usual_s((yield from self._measure(self._choice(rival))))
        self._reducer.switch(dataclasses.replace(of_holder, step=self.next_step))
        after_s = usual_s((yield from self._measure(self._reducer.choice)))
        holder_s = math.sqrt(before_s * after_s)  # in the middle of the turn, if a link becomes slower or faster
        self._duels.add(rival, holder, rival_s / holder_s)
        self._lost_s += (SETTLING + TRIAL) * (rival_s - holder_s)
        return rival_s / holder_s

    def _choices(self) -> dict[Pair, Choice]:
        """What can be tried: by the pair that is for most layers, those that come to the same once."""
        choices: dict[Pair, Choice] = {}
        for pair in self._pairs:
            choice = self._choice(pair)
            if all(choice.ways != other.ways for other in choices.values()):
                choices[pair] = choice
        return choices

    def _choice(self, pair: Pair) -> Choice:
        """Each layer through this pair, or a denser one where that loses too much or costs more than dense."""
        ways: dict[tuple[Pair, str], list[int]] = {}
        dearer = self._dearer_than_dense(pair)
        for layer in self._layers:
            chosen, why = self._dense_enough(pair, layer)
            if layer.id in dearer:
                chosen, why = self._dense, f"dense is cheaper than {pair.compressor} here"
            ways.setdefault((chosen, why), []).append(layer.id)
        parts = tuple(Part(pair=to, layers=tuple(ids), why=why) for (to, why), ids in ways.items())
        return Choice(step=self.next_step, parts=parts)

    def _dense_enough(self, pair: Pair, layer: Layer) -> tuple[Pair, str]:
        error = self._seen[pair][layer.id].error
        if layer.numel <= SMALL or error <= self._auto.error:
            return pair, "tried"
        denser = reversed(self._pairs[: self._pairs.index(pair)])
        chosen = next((other for other in denser if self._seen[other][layer.id].error <= self._auto.error), self._dense)
        return chosen, f"{pair.compressor} would lose {error:.1%} of it"

    def _dearer_than_dense(self, pair: Pair) -> set[int]:
        """Layers that are cheaper dense, where that is worth another message in each bucket."""
        if all(kind.elementwise for kind in self._compressors[pair].emits):
            return set()
        without_waves = LinkCost(wave_s=0.0, byte_s=self._link.byte_s)

        def gain_s(layer: Layer) -> float:
            mine, dense = self._layer_s(pair, layer, without_waves), self._layer_s(self._dense, layer, without_waves)
            return mine - dense

        gains = {layer.id: gain for layer in self._layers if layer.numel > SMALL and (gain := gain_s(layer)) > 0}
        more_s = len(self._buckets) * self._link.wave_s * 2 * (self._transport.world_size - 1)
        return set(gains) if sum(gains.values()) > more_s else set()

    def _layer_s(self, pair: Pair, layer: Layer, link: LinkCost) -> float:
        seen = self._seen[pair][layer.id]
        return seen.seconds + exchange_s(pair, [seen.nbytes], [layer.numel], link, self._transport.world_size)

    def _cost_s(self, choice: Choice) -> float:
        """Seconds of encoding and of messages in a step, one after the other."""
        total = 0.0
        for part, layers in itertools.product(choice.parts, self._buckets):
            seen = [self._seen[part.pair][layer.id] for layer in layers if layer.id in part.layers]
            if seen:
                numel = sum(layer.numel for layer in layers if layer.id in part.layers)
                nbytes = sum(each.nbytes for each in seen)
                total += sum(each.seconds for each in seen)
                total += exchange_s(part.pair, [nbytes], [numel], self._link, self._transport.world_size)
        return total

    def _is_worth_a_trial(self, cost_s: float, standings: Standings) -> bool:
        """Whether steps could be about as short as the shortest, if all messages went beside computing."""
        return max(standings.computing_s(), cost_s) <= WORTH_A_TRIAL * standings.best_s()

    def _switch(self, pair: Pair, why: str) -> None:
        """Hold a pair, and say why."""
        parts = []
        for part in self._choice(pair).parts:
            reason = why if part.why == "tried" else f"{part.why}; else {pair}: {why}"
            parts.append(Part(pair=part.pair, layers=part.layers, why=reason))
        self._reducer.switch(Choice(step=self.next_step, parts=tuple(parts)))

    def _main_pair(self) -> Pair | None:
        """What most elements go through; None before anything was chosen."""
        parts = self._reducer.choice.parts
        if any(part.why == FIRST for part in parts):
            return None
        numel = {layer.id: layer.numel for layer in self._layers}
        return max(parts, key=lambda part: sum(numel.get(layer_id, 0) for layer_id in part.layers)).pair


def _departs(now: StepSeconds, usual: StepSeconds) -> bool:
    """Whether messages take so much less or more time that another pair may be better."""
    low, high = sorted((now.wire_s, usual.wire_s))
    return high > DEPARTURE * low and high - low > NOTICEABLE * usual.step_s


def _median(taken: Sequence[StepSeconds]) -> StepSeconds:
    """Of each figure by itself."""
    return StepSeconds(*map(statistics.median, zip(*taken, strict=True)))
