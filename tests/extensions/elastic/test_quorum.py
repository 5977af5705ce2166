"""Local steps with a quorum: who takes part in an exchange, what is repeated, and from what a rank starts again."""

from __future__ import annotations

import threading
import time
from typing import Any, cast

import pytest
import torch
from torch import nn

from bench.core import registry, spec
from bench.extensions.elastic.coordinator import Coordinator
from bench.extensions.elastic.strategy import Elastic
from collectives.base import Collective
from collectives.options import incompatibility
from collectives.refusals import refuse
from compressors.base import Compressor
from tests.contract.test_local_steps import STEPS as STEPS_OF_TRAIN
from tests.contract.test_local_steps import network, train
from tests.extensions.elastic.quorum import Moment, QuorumRank, QuorumRun, lower, outers, shown
from tests.testing.local_steps import Rank, Scalars, run_local
from tests.testing.thinned import every_second


@pytest.mark.parametrize(
    ("compressor", "collective", "options"),
    [
        ("none", "ring", {"steps": 2}),
        ("topk:ratio=0.1", "ring", {"steps": 2, "decay": 0.9}),
        ("qsgd:bits=4", "allgather", {"steps": 4, "fragments": 2, "outer_momentum": 0.5, "nesterov": True}),
        ("powersgd:rank=2", "ring", {"steps": 3, "alpha": 0.5}),
        ("topk:ratio=0.1", "allgather", {"steps": 3, "average": "senders", "clip": "median"}),
        ("bf16", "server", {"steps": 3}),
        ("bf16", "server:root=1", {"steps": 3}),
        ("bf16", "hierarchical", {"steps": 3}),
    ],
)
def test_without_a_loss_it_is_the_same_bit_for_bit(compressor: str, collective: str, options: dict[str, Any]) -> None:
    pair = {"compressor": compressor, "collective": collective}
    plain = run_local(network, train, ranks=3, **pair, **options)
    run = QuorumRun(3, **pair, **options, quorum=3)
    models = [network() for _ in range(3)]  # here, because threads share torch's generator
    for rank in range(3):
        run.start(rank, models[rank], like_plain)
    for rank, found in run.join().items():
        assert not isinstance(found, BaseException), shown(found)
        for wanted, seen in zip(plain[rank][2::3], found[2::3], strict=True):
            assert torch.equal(wanted, seen)
        assert plain[rank][::3] == found[::3]


def like_plain(rank: QuorumRank) -> list[Any]:
    return train(cast(Rank, _Like(rank)))


class _Like:
    def __init__(self, rank: QuorumRank) -> None:
        self.local, self.model, self.outer = rank.local, rank.model, rank.outer
        self.transport = rank.local.transport
        vars(self.transport)["rank"] = rank.rank  # selects the data of `train`


def killed_run(moment: Moment, compressor: str = "none", collective: str = "ring", **options: Any) -> dict[int, Any]:
    """Three ranks make exchanges; rank 2 is killed in the second. Return what ranks 0 and 1 have seen."""
    run = QuorumRun(3, compressor=compressor, collective=collective, **options)

    def work(rank: QuorumRank) -> tuple[list[torch.Tensor], dict[int, torch.Tensor], int]:
        if rank.rank == 2:
            rank.kill_in(1, moment)
        copies = []
        for _ in range(3):
            rank.step(lower_by_position)
            copies.append(rank.outer())
        return copies, rank.residuals(), rank.members.attempts

    torch.manual_seed(3)
    models = [nn.Linear(9, 5) for _ in range(3)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    for rank in range(3):
        run.start(rank, models[rank], work)
    results = run.join()
    assert set(results) == {0, 1}
    for found in results.values():
        assert not isinstance(found, BaseException), shown(found)
    return results


def lower_by_position(model: nn.Module, rank: int, index: int) -> None:
    for parameter in model.parameters():
        numbers = torch.arange(parameter.numel()).view_as(parameter)
        parameter -= (numbers * (rank + 2) + index).sin()


@pytest.mark.parametrize("moment", ["before", "during", "after"])
@pytest.mark.parametrize(
    ("compressor", "collective"), [("topk:ratio=0.2", "ring"), ("topk:ratio=0.2", "allgather"), ("powersgd", "ring")]
)
def test_members_go_on_equal_and_without_the_one_that_is_lost(moment: Moment, compressor: str, collective: str) -> None:
    results = killed_run(moment, compressor, collective)
    for one, two in zip(*(results[rank][0] for rank in (0, 1)), strict=True):
        assert torch.equal(one, two)
    attempts = 4 if moment == "during" else 3
    assert [results[rank][2] for rank in (0, 1)] == [attempts] * 2


def pairs() -> list[tuple[str, str]]:
    """Return every compressor with the first collective that goes with it and a quorum."""
    options = Elastic(quorum=1)
    found = []
    for name in registry.entries("compressors"):
        compressor = cast(Compressor, spec.build("compressors", name))
        for collective in ("ring", "allgather"):
            bound = cast(Collective, spec.build("collectives", collective))
            if not (
                incompatibility(compressor.check_compatible, bound)
                or incompatibility(refuse, options.pair_refusals, compressor, bound)
            ):
                found.append((name, collective))
                break
    return found


@pytest.mark.parametrize(("compressor", "collective"), every_second(pairs()))
def test_a_repeated_exchange_leaves_no_trace(compressor: str, collective: str) -> None:
    def plain_work(rank: Rank) -> list[Any]:
        return [*train(rank), *rank.model.buffers()]

    plain = run_local(network, plain_work, ranks=3, compressor=compressor, collective=collective, steps=6)
    run = QuorumRun(3, compressor=compressor, collective=collective, steps=6, quorum=3)
    models = [network() for _ in range(3)]  # here, because threads share torch's generator

    def work(rank: QuorumRank) -> tuple[list[Any], int]:
        if rank.rank == 1:
            rank.fail_once_in(1)
        return [*like_plain(rank), *rank.model.buffers()], rank.members.attempts

    for rank in range(3):
        run.start(rank, models[rank], work)
    for rank, found in run.join().items():
        assert not isinstance(found, BaseException), shown(found)
        seen, attempts = found
        assert attempts == 5
        tensors = [each for each in plain[rank] if isinstance(each, torch.Tensor)]
        assert len(tensors) == STEPS_OF_TRAIN + 3
        assert all(map(torch.equal, tensors, [each for each in seen if isinstance(each, torch.Tensor)]))


def test_a_loss_within_a_sum_is_one_before_it() -> None:
    once, twice = (killed_run(moment, "topk:ratio=0.2", decay=0.9) for moment in ("before", "during"))
    for rank in (0, 1):
        assert all(map(torch.equal, once[rank][0], twice[rank][0]))
        assert once[rank][1].keys() == twice[rank][1].keys()
        assert all(torch.equal(once[rank][1][layer], twice[rank][1][layer]) for layer in once[rank][1])


@pytest.mark.parametrize(("moment", "of_second"), [("before", 2.5), ("during", 2.5), ("after", 7.0)])
def test_the_mean_is_over_the_members_whose_differences_are_in_the_sum(moment: Moment, of_second: float) -> None:
    run = QuorumRun(3)

    def work(rank: QuorumRank) -> list[float]:
        if rank.rank == 2:
            rank.kill_in(1, moment)
        return outers(rank, 3)

    for rank in range(3):
        run.start(rank, Scalars(0.0), work)
    results = run.join()
    wanted = [-7.0, -7.0 - of_second, -9.5 - of_second]
    assert results == {0: pytest.approx(wanted), 1: pytest.approx(wanted)}


def await_peer(rank: QuorumRank, status: str) -> None:
    """On rank 0, wait until another rank has this status."""
    if isinstance(coordinator := rank.members.membership, Coordinator):
        while not coordinator._with(status):
            coordinator._poll(time.monotonic() + 1)


def momenta(rank: QuorumRank) -> list[torch.Tensor]:
    """Return the momenta of the outer optimizers, by fragment and parameter."""
    optimizers = [fragment["optimizer"]["state"] for fragment in rank.local.state_dict()["fragments"]]
    return [of_parameter["momentum_buffer"] for state in optimizers for of_parameter in state.values()]


def test_a_rank_that_starts_again_begins_at_the_outer_copy(capsys: pytest.CaptureFixture[str]) -> None:
    run = QuorumRun(3, compressor="topk:ratio=0.5", steps=2, outer_momentum=0.5, quorum=2)
    again, has_joined = threading.Event(), threading.Event()

    def stay(rank: QuorumRank) -> list[Any]:
        counts = []
        for index in range(16):
            if index == 8 and rank.rank == 0:  # the rank that starts again is sent the state after the fifth exchange
                again.set()
                await_peer(rank, "waiting")
            rank.step(lower)
            counts.append((rank.members.membership.num_lost, rank.members.membership.num_returned))
            if index == 9:
                before = rank.outer()
                rank.local.show_inner()
                has_joined.wait()
        return [before, rank.outer(), momenta(rank), counts]

    def leave(rank: QuorumRank) -> None:
        rank.kill_in(2, "during")
        for _ in range(16):
            rank.step(lower)

    def come_back(rank: QuorumRank) -> list[Any]:
        has_joined.set()
        first, before, kept = rank.first_step, rank.outer(), rank.residuals()
        momentum = momenta(rank)
        rank.local.show_inner()
        for _ in range(16 - first):
            rank.step(lower)
        return [first, before, kept, momentum, rank.outer(), momenta(rank)]

    for rank, work in enumerate((stay, stay, leave)):
        run.start(rank, Scalars(0.0, 1.0), work)
    again.wait()
    run.start(2, Scalars(5.0, 5.0), come_back)
    results = run.join()
    assert not isinstance(results[2], BaseException), shown(results[2])
    before, after, momentum, counts = results[0]
    first, started_at, kept, momentum_then, ended_at, momentum_now = results[2]
    assert (first, kept) == (10, {})
    assert torch.equal(started_at, before)
    assert torch.equal(results[1][0], before)
    assert momentum_then[0] is not None
    assert torch.equal(ended_at, after)
    assert torch.equal(results[1][1], after)
    assert torch.equal(momentum_now[0], momentum[0])
    assert counts[1::2] == [(0, 0), (0, 0), (1, 0), (1, 0), (1, 1), (1, 1), (1, 1), (1, 1)]
    told = capsys.readouterr().err
    assert "rank 2 is lost before exchange 2 is done: its connection is closed" in told
    assert "rank 2 returns before exchange 5" in told


@pytest.mark.parametrize("compressor", ["powersgd:rank=2", "topk:ratio=0.1"])
def test_a_rank_starts_with_the_buffers_and_the_memory_of_the_compressor(compressor: str) -> None:
    run = QuorumRun(2, compressor=compressor, quorum=2)
    models = [network() for _ in range(3)]

    def work(rank: QuorumRank) -> list[Any]:
        memory = rank.local.reducer.memory.state_dict()
        copies = [buffer.clone() for buffer in rank.model.buffers()]
        if rank.rank == 1 and rank.first_step == 0:
            rank.kill_in(2, "before")
        for _ in range(4 - rank.first_step):
            if rank.index == 2:
                memory = rank.local.reducer.memory.state_dict()
                copies = [buffer.clone() for buffer in rank.model.buffers()]
            rank.step(forward)
        return [memory, copies, [*rank.model.buffers()], rank.outer()]

    run.start(0, models[0], work)
    run.start(1, models[1], work)
    run._threads[1].join()
    run.start(1, models[2], work)
    results = run.join()
    for found in results.values():
        assert not isinstance(found, BaseException), shown(found)
    (memory, *copies), (memory_then, *copies_then) = results[0], results[1]
    assert memory.keys() == memory_then.keys()
    assert bool(memory) == compressor.startswith("powersgd")
    for name, tensors in memory.items():
        assert all(torch.equal(tensor, memory_then[name][layer]) for layer, tensor in tensors.items())
    for one, two in zip(copies, copies_then, strict=True):
        assert all(map(torch.equal, one, two))


def forward(model: nn.Module, rank: int, index: int) -> None:
    lower_by_position(model, rank, index)
    model((torch.arange(80.0).view(4, 20) * (rank + 1) + index).sin())  # changes running statistics


def test_figures_are_those_of_the_ranks_that_are_there() -> None:
    run = QuorumRun(3, deadline=0.5)

    def work(rank: QuorumRank) -> Any:
        if rank.rank == 2:
            rank.kill_in(2, "before")
        for _ in range(3):
            rank.step(lower)
        return rank.members.share_figures({"of": rank.rank})

    for rank in range(3):
        run.start(rank, Scalars(0.0), work)
    # Rank 2 was killed before it told of its third step.
    assert run.join() == {0: ([{"of": 0}, {"of": 1}], 2), 1: ([{"of": 1}], 0)}
