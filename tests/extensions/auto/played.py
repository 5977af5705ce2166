"""A run of `auto` without a network: two ranks with given step times."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from collectives.allreduce import Ring
from compressors.auto.choice import FIRST, Choice, ChosenPairs, Pair, Part, dense_pair
from compressors.auto.chooser import Chooser, Decisions
from compressors.auto.compressor import Auto
from compressors.auto.ranking import StepSeconds
from compressors.layer import Layer, Step
from gradwire.exchange.report import Bucket
from tests.testing.memory_transport import MemoryTransport, run_threads

NUMELS = (6000, 50, 4000)
LAYERS = [Layer(id=i, name=f"layer{i}", shape=(numel,), numel=numel) for i, numel in enumerate(NUMELS)]
TOPK = Pair("topk:ratio=0.05,value_dtype=fp32", "allgather")
GROUPS = Pair("group_topk:group_size=100,ratio=0.05,value_dtype=fp32", "ring")
WHOLE = Pair("none", "native")
SPARSE, BF16 = Pair("group_topk", "allgather"), Pair("bf16", "ring")
WAYS = (
    Choice.of_all(0, TOPK, LAYERS, "a test"),
    Choice(step=3, parts=(Part(pair=GROUPS, layers=(0, 1), why="a test"), Part(pair=TOPK, layers=(2,), why="a test"))),
    Choice(step=5, parts=(Part(pair=WHOLE, layers=(0,), why="a test"), Part(pair=GROUPS, layers=(1, 2), why="a test"))),
    Choice.of_all(8, WHOLE, LAYERS, "a test"),
)


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(numel, generator=generator) for numel in NUMELS]


class Rank:
    """One rank with a pair for each layer; `exchange` makes a step."""

    def __init__(self, transport: MemoryTransport, first: Choice = WAYS[0]) -> None:
        self.transport = transport
        self.reducer = ChosenPairs(Auto(), first, lambda collective: collective.bind(transport))
        self.sums = Ring().bind(transport)

    def at(self, step: int, epoch: int | None = None) -> Step:
        """Return the step; without epochs, it has full compression."""
        return Step(
            index=step, epoch=epoch or 0, rank=self.transport.rank, world_size=2, seed=1, warmup=epoch is not None
        )

    def exchange(self, step: Step, mine: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the updates of gradients that have separate memory, and check that the gradients are unchanged."""
        given, updates = [each.clone() for each in mine], [torch.empty_like(each) for each in mine]
        bucket = Bucket(layers=list(LAYERS), gradients=list(given), updates=updates, step=step)
        self.reducer.start(bucket, self.sums.start, self.transport).finish()
        assert sorted(encoded.layer.id for encoded in bucket.encoded) == [0, 1, 2]
        assert all(map(torch.equal, given, mine))
        return updates

    def steps(self, start: int, stop: int) -> list[torch.Tensor]:
        """Return the sum of the updates of these steps, times two ranks."""
        totals = [torch.zeros(numel) for numel in NUMELS]
        for step in range(start, stop):
            for choice in WAYS[1:]:
                if choice.step == step:
                    self.reducer.switch(choice)
            updates = self.exchange(self.at(step), gradients(self.transport.rank, step))
            self.reducer.commit()
            for total, update in zip(totals, updates, strict=True):
                total += 2 * update
        return totals


Times = Callable[[int, Pair], StepSeconds]
"""(step, pair of the first layer) -> times of the step"""


def chooser_of(auto: Auto, reducer: ChosenPairs, transport: MemoryTransport) -> Chooser:
    return Chooser(reducer, Ring(), LAYERS, transport, error=auto.error, budget=auto.budget, revise=auto.revise)


def chosen(
    times: Times,
    steps: int,
    options: dict[str, Any] | None = None,
    flat: bool = False,
    steps_per_epoch: int | None = None,
) -> list[list[Choice]]:
    """Return, for each rank, the choice in each step of a run with these step times."""

    def rank(transport: MemoryTransport) -> list[Choice]:
        auto = Auto(**options or {})
        one = Rank(transport, Choice.of_all(0, dense_pair(Ring()), LAYERS, FIRST))
        chooser = chooser_of(auto, one.reducer, transport)
        held: list[Choice] = []

        def exchange(step: int) -> Step:
            at = one.at(step, step // steps_per_epoch if steps_per_epoch else None)
            held.append(exchanged(one, at, flat=flat))
            return at

        run(chooser, chooser.decisions(), exchange, times, steps)
        return held

    return run_threads(rank, 2)


def exchanged(one: Rank, step: Step, *, flat: bool) -> Choice:
    mine = gradients(one.transport.rank, step.index)
    if flat:
        mine[2] = mine[2].sign()
    if one.reducer.look is not None:  # the gradients are not used otherwise here
        one.exchange(step, mine)
        one.reducer.drop()
    return one.reducer.choice


def run(chooser: Chooser, decisions: Decisions, exchange: Callable[[int], Step], times: Times, steps: int) -> None:
    next(decisions)
    told = StepSeconds(0.0, 0.0, 0.0)
    for step in range(steps):
        chooser.step = exchange(step)
        parts = chooser._reducer.choice.parts
        with contextlib.suppress(StopIteration):  # there are no more decisions
            decisions.send(told)  # the times of a step are sent after the next one
        told = times(step, next(part.pair for part in parts if 0 in part.layers))


def slow_link(step: int, pair: Pair) -> StepSeconds:
    wire_s = {"bf16": 0.4, "none": 0.8, "group_topk": 0.02}.get(pair.compressor, 0.05)
    return StepSeconds(0.1 + wire_s, 0.1, wire_s)


def fast_link(step: int, pair: Pair) -> StepSeconds:
    return StepSeconds(0.101, 0.1, 0.001)


def last_held(held: list[Choice]) -> Part:
    """Return the last choice for the first layer, without trials of other pairs."""
    return next(part for choice in reversed(held) if (part := choice.of_layer(0)).why != "tried")
