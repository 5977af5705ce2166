"""Mini-batches: a resumed rank continues with the next ones, and accumulated ones have the same samples."""

from __future__ import annotations

import copy
import itertools
from typing import Any, Literal

import pytest
import torch

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.datasets.base import Samples
from bench.rank import partition
from bench.rank.checkpoint import resized
from bench.rank.data import Batches
from collectives.recoding import EVERY_RANK
from tests.testing.configs import make_config
from tests.testing.local_steps import Rank, run_local
from tests.unit.gradwire.local.test_exchange import drift, network

DATASET = spec.build("datasets", "digits")
TRAIN = Samples(
    inputs=torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 3, 32, 32), targets=torch.arange(40)
)


def make_batches(config: RunConfig, rank: int) -> Batches:
    shards = partition.iid(len(TRAIN), config.replicas, config.seed)
    return Batches(config, DATASET, TRAIN, shards, rank, torch.device("cpu"))  # type: ignore[arg-type]


def batches(**changes: object) -> Batches:
    config = make_config(**{"batch_size": 4, "augment": True, **changes})
    return make_batches(config, 1)


@pytest.mark.parametrize("used", [0, 1, 4, 5, 6, 10])
def test_a_rank_that_goes_on_gets_the_batches_that_were_to_come(used: int) -> None:
    """An epoch has five batches."""
    whole = batches()
    for _ in range(used):
        next(whole)
    resumed = batches()
    next(resumed)  # as after a rehearsal
    resumed.load_state_dict(whole.state_dict())
    for _ in range(7):
        (x, y), (again, labels) = next(whole), next(resumed)
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


def test_accumulated_batches_are_those_of_one_larger_batch() -> None:
    small, large = batches(accumulate=2), batches(batch_size=8)
    for _ in itertools.repeat(None, 4):
        (x, y), (again, labels) = next(small), next(large)
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


@pytest.mark.parametrize("used", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_other_ranks_go_on_without_a_sample_that_was_used_in_the_epoch(world_size: int, used: int) -> None:
    """Two ranks with five batches per epoch become more, or fewer."""
    before, states = [], []
    for rank in range(2):
        old = make_batches(make_config(batch_size=4, augment=False), rank)
        before += [label for _ in range(used) for label in next(old)[1].tolist()]
        states.append({"batches": [old.state_dict()], "counts": {"step": used}, "strategy": {"exchanges": [{}]}})
    config = make_config(batch_size=4, augment=False, replicas=world_size, world_size=world_size)
    per_epoch = 40 // world_size // 4
    after, places = [], []
    for rank in range(world_size):
        state = resized(states, config, rank, "sum", DATASET, TRAIN)  # type: ignore[arg-type]
        new = make_batches(config, rank)
        new.load_state_dict(state["batches"][0])
        new.load_state_dict(new.state_dict())  # a checkpoint within the epoch
        places.append(state["counts"]["step"])
        left = per_epoch - state["counts"]["step"] % per_epoch if state["counts"]["step"] % per_epoch else 0
        after += [label for _ in range(left) for label in next(new)[1].tolist()]
        assert len(next(new)[1]) == 4  # in the next epoch, which uses all samples
    assert len(set(places)) == 1
    assert len({*before, *after}) == len(before) + len(after) > 40 - 4 * world_size


def test_what_waits_to_be_sent_is_applied_by_other_ranks_as_it_would_have_been() -> None:
    """A step applies the mean over ranks, so every new rank gets the mean of what the old ranks kept."""
    states = []
    for rank in range(2):
        reducer = {"residuals": {0: torch.tensor([4.0 + 2 * rank, 1.0])}, "velocities": {}, "memory": {"q": {0: rank}}}
        kept = {(0, rank, rank + 1): torch.tensor([6.0 + rank])}  # sharded: each server keeps a part
        keepers = {(0, 0, 1): 0, (0, 1, 2): 1}
        hook = {"step": 3, "reducer": reducer, "collective": {"residuals": kept, "keepers": keepers}}
        old = batches()
        next(old)
        states.append({"batches": [old.state_dict()], "counts": {}, "strategy": {"exchanges": [hook]}})
    config = make_config(batch_size=4, replicas=3, world_size=3)
    for waiting, mean, served in (("sum", 5.0, [3.0, 3.5]), ("drop", 0.0, [])):
        new = [resized(states, config, rank, waiting, DATASET, TRAIN) for rank in range(3)]  # type: ignore[arg-type]
        exchanges = [state["strategy"]["exchanges"][0] for state in new]
        zero = torch.zeros(2)
        residuals = [exchange["reducer"]["residuals"].get(0, zero) for exchange in exchanges]
        assert float(torch.stack(residuals).mean(dim=0)[0]) == mean
        for state in (exchange["collective"] for exchange in exchanges):
            assert [float(residual) for residual in state["residuals"].values()] == served
            assert state["keepers"] == dict.fromkeys(state["residuals"], EVERY_RANK)
        assert [exchange["reducer"]["memory"]["q"][0] for exchange in exchanges] == [0, 1, 0]


@pytest.mark.parametrize(("waiting", "mean"), [("sum", 5.0), ("drop", 0.0)])
def test_what_a_rings_partial_sums_lost_is_added_by_other_ranks_as_it_would_have_been(
    waiting: Literal["sum", "drop"], mean: float
) -> None:
    states = []
    for rank in range(2):
        nothing = {"residuals": {}, "velocities": {}, "memory": {}}
        ring = {"residuals": {(0, 0, 1): torch.tensor([4.0 + 2 * rank])}, "keepers": {}}
        old = batches()
        next(old)
        exchanges = [{"reducer": nothing, "collective": ring}]
        states.append({"batches": [old.state_dict()], "counts": {}, "strategy": {"exchanges": exchanges}})
    config = make_config(batch_size=4, replicas=3, world_size=3)
    for rank in range(3):
        new = resized(states, config, rank, waiting, DATASET, TRAIN)  # type: ignore[arg-type]
        found = new["strategy"]["exchanges"][0]["collective"]
        assert float(found["residuals"].get((0, 0, 1), torch.zeros(1))) == mean


def test_other_ranks_go_on_with_the_outer_copy_and_an_exchange_that_is_under_way() -> None:
    options: dict[str, Any] = {"steps": 4, "fragments": 2, "delay": 1, "outer_momentum": 0.5, "alpha": 0.5}
    options |= {"compressor": "topk:ratio=0.2", "collective": "allgather"}

    def begin(rank: Rank) -> tuple[Any, Any, torch.Tensor]:
        for index in range(3):  # exchanges begin after steps 1 and 3, and are due after steps 2 and 4
            rank.step(drift, index)
        rank.local.show_outer()
        of_model, of_local = copy.deepcopy((rank.model.state_dict(), rank.local.state_dict()))
        rank.step(drift, 3)
        return of_model, of_local, rank.outer()

    found = run_local(network, begin, **options)
    states = []
    for _, of_local, _ in found:
        old = batches()
        next(old)
        states.append({"batches": [old.state_dict()], "counts": {}, "strategy": {"exchanges": [of_local]}})
    config = make_config(batch_size=4, replicas=3, world_size=3)

    def go_on(rank: Rank) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        new = resized(states, config, rank.transport.rank, "sum", DATASET, TRAIN)  # type: ignore[arg-type]
        rank.model.load_state_dict(found[0][0])
        rank.local.load_state_dict(new["strategy"]["exchanges"][0])
        residuals = copy.deepcopy(rank.local.reducer.state_dict()["residuals"])
        rank.step(drift, 3)
        return residuals, rank.outer()

    for residuals, outer in run_local(network, go_on, ranks=3, **options):
        assert torch.equal(outer, found[0][2])
        of_old = [of_local["reducer"]["residuals"] for _, of_local, _ in found]
        assert residuals.keys() == of_old[0].keys() != set()
        for layer, residual in residuals.items():
            torch.testing.assert_close(residual, (of_old[0][layer] + of_old[1][layer]) / 2)
