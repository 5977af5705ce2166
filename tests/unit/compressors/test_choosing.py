"""`auto`: pairs are tried and chosen, layers change between them, and nothing that waits to be sent is lost."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.options import OptionError
from collectives.ring import Ring
from collectives.server import Server
from compressors.auto import Auto
from compressors.choice import FIRST, Choice, Pair, Part, dense_pair, pairs_on, read_choices
from compressors.ddp.bucket import Bucket
from compressors.ddp.choosing import prices
from compressors.ddp.choosing.chooser import Chooser, Decisions
from compressors.ddp.choosing.prices import LinkCost, exchange_s, measure_link
from compressors.ddp.choosing.reducer import ChosenPairs
from compressors.ddp.choosing.standings import StepSeconds
from compressors.layer import Layer, Step
from tests.testing.memory_transport import MemoryTransport, run_threads

NUMELS = (6000, 50, 4000)
LAYERS = [Layer(id=i, name=f"layer{i}", shape=(numel,), numel=numel) for i, numel in enumerate(NUMELS)]
TOPK = Pair("topk:ratio=0.05,value_dtype=fp32", "allgather")
GROUPS = Pair("group_topk:group_size=100,ratio=0.05,value_dtype=fp32", "ring")
WHOLE = Pair("none", "native")
SPARSE, BF16 = Pair("group_topk", "ring"), Pair("bf16", "ring")
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
    """One rank with pairs at work; `exchange` makes a step."""

    def __init__(self, transport: MemoryTransport, first: Choice = WAYS[0]) -> None:
        self.transport = transport
        self.reducer = ChosenPairs(Auto(), first, lambda collective: collective.bind(transport))
        self.sums = Ring().bind(transport)

    def exchange(self, step: int, mine: list[torch.Tensor]) -> list[torch.Tensor]:
        at = Step(index=step, epoch=0, rank=self.transport.rank, world_size=2, seed=1, warmup=False)
        bucket = Bucket(layers=list(LAYERS), gradients=[each.clone() for each in mine], step=at)
        self.reducer.start(bucket, self.sums.start, self.transport).finish()
        assert sorted(encoded.layer.id for encoded in bucket.encoded) == [0, 1, 2]
        return bucket.gradients

    def steps(self, start: int, stop: int) -> list[torch.Tensor]:
        """The sum over these steps of the updates, times two ranks."""
        totals = [torch.zeros(numel) for numel in NUMELS]
        for step in range(start, stop):
            for choice in WAYS[1:]:
                if choice.step == step:
                    self.reducer.switch(choice)
            updates = self.exchange(step, gradients(self.transport.rank, step))
            self.reducer.commit()
            for total, update in zip(totals, updates, strict=True):
                total += 2 * update
        return totals


def test_what_waits_goes_with_its_layer_from_pair_to_pair_and_is_sent_by_a_dense_one() -> None:
    def rank(transport: MemoryTransport) -> tuple[list[torch.Tensor], dict[int, float]]:
        one = Rank(transport)
        return one.steps(0, 9), one.reducer.residual_norms()

    (totals, norms), (others, _) = run_threads(rank, 2)
    assert norms == {}
    for layer_id, (total, other) in enumerate(zip(totals, others, strict=True)):
        assert torch.equal(total, other)
        given = torch.stack([gradients(rank, step)[layer_id] for rank in range(2) for step in range(9)]).sum(0)
        torch.testing.assert_close(total, given, rtol=1e-4, atol=1e-4)


def test_a_step_that_is_dropped_right_after_a_change_takes_nothing_away() -> None:
    def rank(transport: MemoryTransport) -> tuple[bool, float]:
        one = Rank(transport)
        one.steps(0, 3)
        one.reducer.switch(WAYS[3])
        first = one.exchange(3, gradients(transport.rank, 3))
        one.reducer.drop()
        again = one.exchange(3, gradients(transport.rank, 3))
        one.reducer.commit()
        third = one.exchange(4, gradients(transport.rank, 3))
        return all(map(torch.equal, first, again)), float((third[0] - again[0]).norm())

    for same, sent_before in run_threads(rank, 2):
        assert same
        assert sent_before > 1  # and once only


def test_state_that_is_saved_between_two_pairs_goes_on_bit_for_bit() -> None:
    def rank(transport: MemoryTransport) -> bool:
        whole = Rank(transport)
        whole.steps(0, 5)
        whole.reducer.switch(WAYS[2])
        other = Rank(transport)
        other.reducer.load_state_dict(whole.reducer.state_dict())
        return all(map(torch.equal, whole.steps(6, 9), other.steps(6, 9)))

    assert run_threads(rank, 2) == [True, True]


@pytest.fixture(autouse=True)
def prices_that_no_other_work_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressors.ddp.choosing.chooser.measure_link", lambda *_: LinkCost(wave_s=1e-5, byte_s=1e-9))
    looked = prices.look
    monkeypatch.setattr("compressors.ddp.choosing.chooser.look", lambda *given: looked(*given)._replace(seconds=1e-5))


def test_a_link_is_measured_alike_on_all_ranks_and_none_of_it_counts_as_gradient() -> None:
    def rank(transport: MemoryTransport) -> tuple[LinkCost, int]:
        return measure_link(Ring().bind(transport), transport), transport.traffic["gradient"].nbytes

    (cost, nbytes), other = run_threads(rank, 2)
    assert (cost, nbytes) == other
    assert cost.wave_s > 0
    assert nbytes == 0


def test_a_price_grows_with_bytes_waves_and_ranks() -> None:
    link = LinkCost(wave_s=1.0, byte_s=1e-3)
    assert exchange_s(BF16, [2000], [1000], link, 1) == 0
    assert exchange_s(BF16, [2000], [1000], link, 2) == pytest.approx(2 + 2.0)
    assert exchange_s(BF16, [2000], [1000], link, 4) == pytest.approx(6 + 3.0)
    allgather = exchange_s(Pair("topk", "allgather"), [100], [1000], link, 4)
    assert allgather == pytest.approx(1 + 0.3)
    merged = exchange_s(SPARSE, [100], [1000], link, 4)
    assert 6 + 0.3 < merged < 6 + 3 * 4.0


Times = Callable[[int, Pair], StepSeconds]
"""(step, what most elements go through) -> what the step takes"""


def chosen(times: Times, steps: int, options: dict[str, Any] | None = None, flat: bool = False) -> list[list[Choice]]:
    """By rank, what holds in each step of a run in which steps take these times."""

    def rank(transport: MemoryTransport) -> list[Choice]:
        auto = Auto(**options or {})
        one = Rank(transport, Choice.of_all(0, dense_pair(Ring()), LAYERS, FIRST))
        chooser = Chooser(auto, one.reducer, Ring(), LAYERS, transport)
        held: list[Choice] = []
        run(chooser, chooser.decisions(), lambda step: held.append(exchanged(one, step, flat=flat)), times, steps)
        return held

    return run_threads(rank, 2)


def exchanged(one: Rank, step: int, *, flat: bool) -> Choice:
    mine = gradients(one.transport.rank, step)
    if flat:
        mine[2] = mine[2].sign()
    if one.reducer.look is not None:  # nothing else comes of the gradients here
        one.exchange(step, mine)
        one.reducer.drop()
    return one.reducer.choice


def run(chooser: Chooser, decisions: Decisions, step_of: Callable[[int], object], times: Times, steps: int) -> None:
    next(decisions)
    told = StepSeconds(0.0, 0.0, 0.0)
    for step in range(steps):
        step_of(step)
        chooser.next_step = step + 1
        parts = chooser._reducer.choice.parts
        with contextlib.suppress(StopIteration):  # nothing more is to be decided
            decisions.send(told)  # what a step took is told after the next one
        told = times(step, next(part.pair for part in parts if 0 in part.layers))


def slow_link(step: int, pair: Pair) -> StepSeconds:
    wire_s = {"bf16": 0.4, "none": 0.8, "group_topk": 0.02}.get(pair.compressor, 0.05)
    return StepSeconds(0.1 + wire_s, 0.1, wire_s)


def fast_link(step: int, pair: Pair) -> StepSeconds:
    return StepSeconds(0.101, 0.1, 0.001)


def test_the_fastest_pair_that_was_tried_is_kept_and_all_ranks_know_why() -> None:
    first, second = chosen(slow_link, 150)
    assert first == second
    assert first[0].parts[0].why == FIRST
    assert first[-1].of_layer(0).pair == SPARSE
    assert "120 ms a step" in first[-1].of_layer(0).why
    tried = {choice.of_layer(0).pair for choice in first}
    assert len(tried) > 2  # the link of a test is as fast as memory, so most are worth it


def test_where_nothing_pays_gradients_stay_dense() -> None:
    held = chosen(fast_link, 200)[0]
    assert held[-1].of_layer(0).pair.compressor in {"none", "bf16"}


def test_a_link_that_becomes_slow_and_then_fast_again_changes_the_choice() -> None:
    def changing(step: int, pair: Pair) -> StepSeconds:
        return slow_link(step, pair) if 300 <= step < 600 else fast_link(step, pair)

    held = chosen(changing, 1000, {"budget": 1.0})[0]
    assert [held[step].of_layer(0).pair == SPARSE for step in (299, 599, 999)] == [False, True, False]
    assert "messages went from 20 ms to 1 ms" in held[999].of_layer(0).why
    assert chosen(changing, 600, {"revise": False})[0][-1].of_layer(0).pair != SPARSE


def test_steps_that_stay_as_they_are_are_left_alone() -> None:
    held = chosen(slow_link, 570)[0]
    assert {choice.of_layer(0).pair for choice in held[330:]} == {SPARSE}  # turns of the one behind have become rare


def by_chance(seed: int, spread: float) -> Times:
    """Steps as on shared cores: each differs, and what is waited for differs more."""

    def times(step: int, pair: Pair) -> StepSeconds:
        longer, later = (random.Random(f"{seed} {step} {what}").lognormvariate(0, spread) for what in range(2))
        return StepSeconds(usual_s(pair) * longer, 0.03 * longer, (usual_s(pair) - 0.03) * longer * later)

    return times


def usual_s(pair: Pair) -> float:
    return {"bf16": 0.055, "none": 0.06, "hylo": 0.05, "group_topk": 0.058, "topk": 0.065}[
        pair.compressor.partition(":")[0]
    ]


@pytest.mark.parametrize("seed", range(8))
def test_few_steps_that_happened_to_be_short_do_not_win(seed: int) -> None:
    held = chosen(by_chance(seed, 0.2), 200, {"revise": False})[0][-1]
    assert usual_s(held.of_layer(0).pair) <= 1.1 * 0.05


def unlucky_at_first(step: int, pair: Pair) -> StepSeconds:
    """Steps of the fastest pair are long ones for as long as all are tried."""
    step_s = {SPARSE: 0.06, Pair("topk", "allgather"): 0.066 if step < 150 else 0.055}.get(pair, 0.12)
    return StepSeconds(step_s, 0.03, step_s - 0.03)


def test_the_nearest_pair_has_a_turn_now_and_then_and_wins_by_many() -> None:
    held = chosen(unlucky_at_first, 1000, {"budget": 1e-6})[0]
    assert next(choice for choice in held if "after" in choice.of_layer(0).why).of_layer(0).pair == SPARSE
    assert "times those with group_topk on ring" in held[-1].of_layer(0).why
    since = [choice.of_layer(0).pair.compressor for choice in held[200:]]
    assert set(since) == {"group_topk", "topk"}  # the others are far behind
    assert since.count("topk") > 0.6 * len(since)


def test_a_favourite_that_was_slow_when_it_was_tried_is_not_forgotten() -> None:
    def disturbed_at_first(step: int, pair: Pair) -> StepSeconds:
        is_favourite = pair == Pair("topk", "allgather")
        step_s = (0.4 if step < 60 else 0.05) if is_favourite else usual_s(pair) + 0.1
        return StepSeconds(step_s, 0.03, step_s - 0.03)

    held = chosen(disturbed_at_first, 600)[0]
    assert held[200].of_layer(0).pair.compressor != "topk"
    assert held[-1].of_layer(0).pair.compressor == "topk"
    assert "after steps of topk on allgather took 0.3" in held[-1].of_layer(0).why


def test_a_link_that_fades_makes_no_pair_look_slower_than_it_is() -> None:
    def fading(step: int, pair: Pair) -> StepSeconds:
        fresh_s = {SPARSE: 0.058, Pair("topk", "allgather"): 0.06}.get(pair, 0.12)
        step_s = fresh_s * 1.01 ** (step % 80)
        return StepSeconds(step_s, 0.03, step_s - 0.03)

    held = chosen(fading, 1000, {"budget": 1e-6})[0]
    since = [choice.of_layer(0).pair for choice in held[200:]]
    assert since.count(SPARSE) > 0.8 * len(since)


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


def test_choices_are_made_again_at_the_same_steps() -> None:
    made = chosen(slow_link, 60)[0]

    def rank(transport: MemoryTransport) -> list[Choice]:
        one = Rank(transport, made[0])
        chooser = Chooser(Auto(), one.reducer, Ring(), LAYERS, transport)
        held: list[Choice] = []
        later = [choice for index, choice in enumerate(made) if index and choice != made[index - 1]]
        decisions = chooser.follow(later)
        run(chooser, decisions, lambda step: held.append(exchanged(one, step, flat=False)), fast_link, later[-1].step)
        return held

    assert run_threads(rank, 2) == [made[: made[-1].step]] * 2


def test_a_file_of_choices_ends_where_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    path.write_text("".join(json.dumps(choice.to_dict()) + "\n" for choice in WAYS) + '{"step": 9, "pa')
    assert read_choices(path) == list(WAYS)
    assert WAYS[1].summary(LAYERS) == f"{GROUPS} 60.2%, {TOPK} 39.8%"


@pytest.mark.parametrize("text", ["[]\n", '{"step": 1}\n', "not json\n", '{"step": 1, "parts": [{"layers": []}]}\n'])
def test_a_file_that_holds_no_choices_is_refused_in_one_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "choices.jsonl"
    path.write_text(text)
    with pytest.raises(OptionError, match=r"holds no choices .*; give the choices.jsonl of a run of auto"):
        Auto(choices=str(path))
    with pytest.raises(OptionError, match="holds no choices"):
        Auto(choices=str(tmp_path / "absent"))


def test_pairs_ride_on_the_collective_that_was_asked_for_or_on_allgather() -> None:
    assert {pair.collective for pair in pairs_on(Ring())} == {"ring", "allgather"}
    assert Auto().refusal(Ring()) is None
    assert "use collective ring" in str(Auto().refusal(Server()))
