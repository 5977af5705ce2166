"""Pairs are tried in short trials, and the choice follows the measured times."""

from __future__ import annotations

import collections
import itertools
import random

import pytest
import torch

from compressors.auto.candidates import MessageCost, Seen
from compressors.auto.candidates import look as encode_twice
from compressors.auto.choice import FIRST, Pair
from compressors.auto.ranking import SETTLING, StepSeconds
from compressors.base import Compressor
from compressors.layer import Layer, Step
from tests.extensions.auto.played import (
    BF16,
    SPARSE,
    Times,
    chosen,
    fast_link,
    last_held,
    slow_link,
)
from tests.testing.memory_transport import MemoryTransport


def test_the_fastest_pair_that_was_tried_is_kept_and_all_ranks_know_why() -> None:
    first, second = chosen(slow_link, 150)
    assert first == second
    assert first[0].parts[0].why == FIRST
    assert first[-1].of_layer(0).pair == SPARSE
    assert "120 ms a step" in first[-1].of_layer(0).why
    tried = {choice.of_layer(0).pair for choice in first}
    assert len(tried) > 2  # the link of a test is as fast as memory, so most pairs are worth a trial


def test_where_nothing_pays_gradients_stay_dense() -> None:
    held = chosen(fast_link, 300)[0]
    assert last_held(held).pair.compressor in {"none", "bf16"}


def test_a_link_that_becomes_slow_and_then_fast_again_changes_the_choice() -> None:
    def changing(step: int, pair: Pair) -> StepSeconds:
        return slow_link(step, pair) if 300 <= step < 600 else fast_link(step, pair)

    held = chosen(changing, 1000, {"budget": 1.0})[0]
    assert [last_held(held[:stop]).pair == SPARSE for stop in (300, 600, 1000)] == [False, True, False]
    assert "messages went from 20 ms to 1 ms" in last_held(held).why
    assert last_held(chosen(changing, 600, {"revise": False})[0]).pair != SPARSE


def test_steps_that_stay_as_they_are_are_left_alone() -> None:
    held = chosen(slow_link, 600)[0]
    assert {choice.of_layer(0).pair for choice in held[360:]} == {SPARSE}  # trials of the slower pair have become rare


def by_chance(seed: int, spread: float) -> Times:
    """Return step times as on shared cores: each differs, and waiting times differ more."""

    def times(step: int, pair: Pair) -> StepSeconds:
        longer, later = (random.Random(f"{seed} {step} {what}").lognormvariate(0, spread) for what in range(2))
        return StepSeconds(usual_s(pair) * longer, 0.03 * longer, (usual_s(pair) - 0.03) * longer * later)

    return times


def usual_s(pair: Pair) -> float:
    return {"bf16": 0.055, "none": 0.06, "hylo": 0.05, "group_topk": 0.058, "qsparse": 0.065}[
        pair.compressor.partition(":")[0]
    ]


@pytest.mark.parametrize("seed", range(8))
def test_few_steps_that_happened_to_be_short_do_not_win(seed: int) -> None:
    held = chosen(by_chance(seed, 0.2), 300, {"revise": False})[0][-1]
    assert usual_s(held.of_layer(0).pair) <= 1.1 * 0.05


def unlucky_at_first(step: int, pair: Pair) -> StepSeconds:
    """Return step times in which the fastest pair is slow while all pairs are tried."""
    step_s = {SPARSE: 0.06, Pair("qsparse", "allgather"): 0.066 if step < 150 else 0.055}.get(pair, 0.12)
    return StepSeconds(step_s, 0.03, step_s - 0.03)


def test_the_nearest_pair_has_a_turn_now_and_then_and_wins_by_many() -> None:
    held = chosen(unlucky_at_first, 1000, {"budget": 1e-6})[0]
    assert next(choice for choice in held if "after" in choice.of_layer(0).why).of_layer(0).pair == SPARSE
    assert "times as long as with group_topk on allgather" in held[-1].of_layer(0).why
    since = [choice.of_layer(0).pair.compressor for choice in held[200:]]
    assert set(since) == {"group_topk", "qsparse"}  # the others are far slower
    assert since.count("qsparse") > 0.6 * len(since)


def test_a_favourite_that_was_slow_when_it_was_tried_is_not_forgotten() -> None:
    def disturbed_at_first(step: int, pair: Pair) -> StepSeconds:
        is_favourite = pair == Pair("qsparse", "allgather")
        step_s = (0.4 if step < 60 else 0.05) if is_favourite else usual_s(pair) + 0.1
        return StepSeconds(step_s, 0.03, step_s - 0.03)

    held = chosen(disturbed_at_first, 1000)[0]
    assert held[200].of_layer(0).pair.compressor != "qsparse"
    assert held[-1].of_layer(0).pair.compressor == "qsparse"
    assert "50 ms a step, hylo on allgather 150 ms" in held[-1].of_layer(0).why


def test_a_link_that_fades_makes_no_pair_look_slower_than_it_is() -> None:
    def fading(step: int, pair: Pair) -> StepSeconds:
        fresh_s = {SPARSE: 0.058, Pair("qsparse", "allgather"): 0.06}.get(pair, 0.12)
        step_s = fresh_s * 1.01 ** (step % 80)
        return StepSeconds(step_s, 0.03, step_s - 0.03)

    held = chosen(fading, 1000, {"budget": 1e-6})[0]
    since = [choice.of_layer(0).pair for choice in held[200:]]
    assert since.count(SPARSE) > 0.8 * len(since)


def test_a_pair_that_is_far_behind_has_no_more_steps_than_show_it() -> None:
    def far_behind(step: int, pair: Pair) -> StepSeconds:
        step_s = {SPARSE: 0.1, BF16: 0.26}.get(pair, 0.2)
        return StepSeconds(step_s, 0.01, step_s - 0.01)

    held = [choice.of_layer(0) for choice in chosen(far_behind, 150)[0]]
    trials = [[part.pair for part in run].count(BF16) for _, run in itertools.groupby(held, key=lambda part: part.pair)]
    assert [count for count in trials if count] == [1, SETTLING + 1]  # the first step of all, and one trial


def test_dense_pairs_are_not_tried_on_a_link_that_has_become_slow_since_it_was_priced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    priced = collections.Counter[int]()

    def becomes_slow(collective: object, transport: MemoryTransport) -> MessageCost:
        priced[transport.rank] += 1
        return MessageCost(wave_s=1e-5, per_byte_s=1e-9 if priced[transport.rank] == 1 else 1e-4)

    monkeypatch.setattr("compressors.auto.chooser.measure_link", becomes_slow)

    def slower_and_slower(step: int, pair: Pair) -> StepSeconds:
        seconds = slow_link(step, pair)
        return seconds if step < 9 else StepSeconds(*(2 * each for each in seconds))

    held = chosen(slower_and_slower, 150)[0]
    tried = {choice.of_layer(0).pair.compressor for choice in held[1:]}
    assert {"group_topk", "qsparse"} <= tried <= {"group_topk", "group_topk:ratio=0.1", "hylo", "qsparse"}


@pytest.mark.parametrize("times", [2.5, 0.4])
@pytest.mark.parametrize("at", range(6, 78, 9))
def test_a_link_that_jumps_while_pairs_are_tried_makes_none_look_better_than_it_is(at: int, times: float) -> None:
    def jumping(step: int, pair: Pair) -> StepSeconds:
        before_s = {SPARSE: 0.066, Pair("qsparse", "allgather"): 0.06, Pair("hylo", "allgather"): 0.08}.get(pair, 0.12)
        step_s = before_s * (times if step >= at else 1)
        return StepSeconds(step_s, 0.01, step_s - 0.01)

    held = chosen(jumping, 300, {"revise": False})[0]
    assert held[-1].of_layer(0).pair.compressor == "qsparse"


def test_what_is_held_gives_way_to_no_sparse_pair_that_is_only_as_good() -> None:
    def later_the_same(step: int, pair: Pair) -> StepSeconds:
        step_s = {SPARSE: 0.06, Pair("qsparse", "allgather"): 0.06 if step > 300 else 0.055}.get(pair, 0.12)
        return StepSeconds(step_s, 0.01, step_s - 0.01)

    held = chosen(later_the_same, 1000, {"budget": 1.0})[0]
    assert last_held(held).pair.compressor == "qsparse"
    assert "after 513 steps" in last_held(held).why


def test_gradients_are_looked_at_again_after_many_steps_and_not_because_the_link_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def jumping(step: int, pair: Pair) -> StepSeconds:
        return slow_link(step, pair) if step // 300 % 2 else fast_link(step, pair)

    looked_in: set[int] = set()

    def look(compressor: Compressor, layer: Layer, x: torch.Tensor, step: Step) -> Seen:
        looked_in.add(step.index)
        return encode_twice(compressor, layer, x, step)._replace(seconds=1e-5)

    monkeypatch.setattr("compressors.auto.candidates.look", look)
    held = chosen(jumping, 1000, {"budget": 1.0})[0]
    assert (
        sum(
            a.of_layer(0).why != b.of_layer(0).why and "messages went" in b.of_layer(0).why
            for a, b in itertools.pairwise(held)
        )
        >= 3
    )
    assert [step for step in sorted(looked_in) if step < 500] == [0]
    assert max(looked_in) > 500


STEPS_PER_EPOCH = 300


def sparser_every_epoch(step: int, pair: Pair) -> StepSeconds:
    """Sparse pairs begin with a quarter of the entries, a sixteenth in the second epoch, and so on."""
    share = max(0.01, 0.25 ** (step // STEPS_PER_EPOCH + 1))
    wire_s = {"hylo": 0.06, "bf16": 0.4, "none": 0.8}.get(pair.compressor, 0.03 + 0.4 * share)
    return StepSeconds(0.1 + wire_s, 0.1, wire_s)


def test_pairs_that_begin_with_more_entries_are_tried_again_when_they_send_fewer() -> None:
    held = chosen(sparser_every_epoch, 2 * STEPS_PER_EPOCH, {"budget": 1e-6}, steps_per_epoch=STEPS_PER_EPOCH)[0]
    assert last_held(held[:STEPS_PER_EPOCH]).pair.compressor == "hylo"
    assert last_held(held).pair.compressor in {"group_topk", "qsparse"}
    assert "after sparse compressors began to send fewer entries" in last_held(held).why


@pytest.mark.parametrize("seed", range(4))
def test_chance_alone_is_no_change_of_the_link(seed: int) -> None:
    held = chosen(by_chance(seed, 0.12), 400)[0]
    assert not [why for choice in held[200:] if "went from" in (why := choice.of_layer(0).why)]
    assert len({choice.of_layer(0).pair for choice in held[200:]}) <= 2


def test_a_layer_that_would_lose_too_much_goes_through_a_denser_pair() -> None:
    held = chosen(slow_link, 150, flat=True)[0][-1]
    assert held.of_layer(0).pair == SPARSE
    assert held.of_layer(2).pair != SPARSE
    assert "group_topk would lose 99" in held.of_layer(2).why
    assert chosen(slow_link, 150, {"error": 1.0}, flat=True)[0][-1].of_layer(2).pair == SPARSE
