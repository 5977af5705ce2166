"""Local steps by speed: the plan of steps, the weighted mean, the steps of the run, and the state."""

from __future__ import annotations

import copy
import itertools
import random
import threading
import types
from typing import Any, cast

import pytest
import torch

from gradwire.local import by_speed
from gradwire.local.by_speed import FIRST_STEPS, LocalStepsBySpeed, planned_steps
from tests.testing.local_steps import Rank, Scalars, flat, run_local


@pytest.mark.parametrize(
    ("step_s", "seconds", "left", "steps"),
    [
        ([0.5, 0.5], 2.0, 100, [4, 4]),
        ([0.25, 0.5, 1.0], 2.0, 140, [8, 4, 2]),
        ([0.5, 0.5], 2.0, 10, [5, 5]),  # one interval, because two would be too short
        ([0.5, 0.5], 2.0, 18, [5, 4]),
        ([0.1, 0.1], 2.0, 6, [3, 3]),
        ([0.001, 1.0], 0.01, 7, [6, 1]),  # at least one step
        ([9.0, 9.0, 9.0], 2.0, 3, [1, 1, 1]),
    ],
)
def test_plan(step_s: list[float], seconds: float, left: int, steps: list[int]) -> None:
    assert planned_steps(step_s, seconds, left) == steps


def test_every_plan_ends_at_the_stop() -> None:
    draw = random.Random(3)
    for _ in range(300):
        ranks = draw.randint(1, 9)
        left, intervals = ranks * draw.randint(1, 200), 0
        while left:
            step_s = [draw.uniform(0.001, 1) ** 2 for _ in range(ranks)]
            steps = planned_steps(step_s, 0.5, left)
            assert min(steps) >= 1
            left -= sum(steps)
            assert left == 0 or left >= ranks
            intervals += 1
        assert intervals <= 200


class Clock(threading.local):
    """The time of a thread, which a rank moves itself."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(by_speed, "time", types.SimpleNamespace(perf_counter=lambda: found.now))
    return found


Seen = list[tuple[int, int, float, int]]


def train(rank: Rank, clock: Clock, step_s: list[float], stop_at: int, index: int = 0) -> Seen:
    """Subtract 1 in every step until the run stops.

    Return for every exchange the steps of the rank, those of the run, the value and the bytes sent so far.
    """
    local = cast(LocalStepsBySpeed, rank.local)
    seen: Seen = []
    sent = sum(entry.nbytes for entry in rank.transport.traffic.values())
    while local.num_steps < stop_at:
        local.plan(stop_at)
        clock.now += step_s[rank.transport.rank]
        before = local.num_steps
        rank.step(lambda model, *_: next(model.parameters()).sub_(1.0), index)
        index += 1
        assert before <= local.num_steps <= stop_at
        now = sum(entry.nbytes for entry in rank.transport.traffic.values())
        if now > sent:
            seen.append((index, local.num_steps, float(flat(rank.model)), now))
            sent = now
        else:
            assert local.num_steps < stop_at  # all ranks stop at an exchange
    return seen


def test_ranks_meet_at_exchanges_and_count_by_their_steps(clock: Clock) -> None:
    def work(rank: Rank) -> Any:
        seen = train(rank, clock, [0.25, 0.6], 26)
        return seen, {purpose: entry.nbytes for purpose, entry in rank.transport.traffic.items()}

    (fast, sent), (slow, _) = run_local(lambda: Scalars(0.0), work, steps="auto", seconds=2.0)
    # first of 52 steps in 5 intervals, then of the other 42, of which 11 take 2 s, in 3
    assert [each[0] for each in fast[:2]] == [FIRST_STEPS, FIRST_STEPS + 10]
    assert [each[0] for each in slow[:2]] == [FIRST_STEPS, FIRST_STEPS + 4]
    assert [each[1:3] for each in fast] == [each[1:3] for each in slow]  # the same run, the same parameters
    moved = fast[0][2] - fast[1][2]
    assert moved == pytest.approx((10 * 10 + 4 * 4) / 14)  # weighted by steps: the plain mean would be 7
    assert fast[-1][0] + slow[-1][0] == 52
    assert fast[-1][1] == 26
    assert sent["control"] == len(fast) * 3 * 8


def test_ranks_compute_five_times_as_long_as_the_last_exchange_but_one(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = LocalStepsBySpeed._begin

    def on_a_slow_link(self: LocalStepsBySpeed) -> None:
        clock.now += 1.0 + self.transport.rank
        begin(self)

    monkeypatch.setattr(LocalStepsBySpeed, "_begin", on_a_slow_link)
    found = run_local(lambda: Scalars(0.0), lambda rank: train(rank, clock, [0.5, 0.5], 90), steps="auto", seconds=2.0)
    for seen in found:
        steps = [each[0] for each in seen]
        assert [b - a for a, b in itertools.pairwise(steps)][:3] == [4, 20, 20]  # 2 s, then 5 x 2 s


def test_a_saved_state_goes_on_bit_for_bit(clock: Clock) -> None:
    options: dict[str, Any] = {"steps": "auto", "seconds": 2.0, "outer_momentum": 0.5}

    def work(rank: Rank, *, stops: bool) -> Any:
        seen = train(rank, clock, [0.25, 0.4], 12)
        if stops:
            rank.local.show_outer()
            state = copy.deepcopy((rank.model.state_dict(), rank.local.state_dict()))
            again = Rank(rank.transport, rank.model, "none", "ring", options)
            next(again.model.parameters()).data.fill_(7.0)
            again.model.load_state_dict(state[0])
            again.local.load_state_dict(state[1])
            rank = again
        return [each[:3] for each in train(rank, clock, [0.25, 0.4], 30, seen[-1][0])], rank.outer()

    plain = run_local(lambda: Scalars(0.0), lambda rank: work(rank, stops=False), **options)
    resumed = run_local(lambda: Scalars(0.0), lambda rank: work(rank, stops=True), **options)
    assert [each[0] for each in plain] == [each[0] for each in resumed]
    assert torch.equal(plain[0][1], resumed[1][1])
