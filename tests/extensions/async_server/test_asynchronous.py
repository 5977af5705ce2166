"""Asynchronous server training over gloo: a bound of 0 equals synchronous training bit for bit; larger bounds hold."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bench.core import spec
from bench.strategies.base import Batch, BoundStrategy, Setup
from collectives.transport.base import TransportError
from compressors.layer import Step
from gradwire.exchange.report import StepReport
from tests.testing.configs import make_config
from tests.testing.ranks import run_ranks

pytestmark = pytest.mark.xdist_group("asynchronous")  # its ranks train once for all tests

WORLD_SIZE = 3
STEPS = 5
LR = 0.05
# (compressor, optimizer, options of both the server and the strategy)
ALIKE = [
    ("none", "sgd", ""),
    ("none", "adamw", ":root=2"),
    ("fp16", "sgd:nesterov=true,weight_decay=0.01", ""),
    ("topk:ratio=0.1,min_numel=20", "sgd", ""),
    ("sign", "adam", ""),
    ("randomk:ratio=0.2", "sgd", ":root=1"),
]
SLOW_RANK = 2


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10), nn.ReLU(), nn.Linear(10, 3))


def bound(strategy: str, compressor: str = "none", optimizer: str = "sgd", collective: str = "server") -> BoundStrategy:
    config = make_config(world_size=dist.get_world_size(), lr=LR)
    parts: dict[str, Any] = {
        "compressor": spec.build("compressors", compressor),
        "collective": spec.build("collectives", collective),
        "optimizer": spec.build("optimizers", optimizer),
    }
    made: Any = spec.build("strategies", strategy)
    training: BoundStrategy = made.bind(Setup(config=config, model=network(), device=torch.device("cpu"), **parts))
    return training


class Poisoned(nn.Module):
    """A network whose loss and gradients are NaN."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x) * float("nan")  # type: ignore[no-any-return]


class PoisonedBatch(Batch):
    """A batch with a loss of NaN."""

    def backward(self, network: nn.Module, accumulating: Any = contextlib.nullcontext) -> None:
        super().backward(Poisoned(network), accumulating)


def train_step(training: BoundStrategy, index: int, *, poison: bool = False) -> StepReport:
    """Make one step on data that differ between ranks and steps, with a decreasing learning rate."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + index)
    x, y = torch.randn(5, 1, 8, 8, generator=generator), torch.randint(3, (5,), generator=generator)
    where = Step(index=index, epoch=0, rank=dist.get_rank(), world_size=dist.get_world_size(), seed=1, warmup=False)
    batch = (PoisonedBatch if poison else Batch)(x=x, y=y, step=where, lr=LR / (index + 1))
    return training.train_step(batch)


def weights(model: nn.Module) -> bytes:
    """Return all parameters as bytes; a tensor would be in memory of the process that ends."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().tobytes()


@dataclasses.dataclass
class Seen:
    """Results of one rank in all cases."""

    alike: list[tuple[bytes, bytes]] = dataclasses.field(default_factory=list)
    staleness: dict[int, list[int | None]] = dataclasses.field(default_factory=dict)
    own_steps: int = 0
    synchronized: list[bytes] = dataclasses.field(default_factory=list)
    skipped: list[bool] = dataclasses.field(default_factory=list)
    kept_residual: bool = False


def everything(rank: int) -> Seen:
    seen = Seen()
    for compressor, optimizer, options in ALIKE:
        ends = []
        for strategy, collective in (("ddp", f"server{options}"), (f"async_server{options}", "server")):
            training = bound(strategy, compressor, optimizer, collective)
            for index in range(STEPS):
                assert train_step(training, index).num_steps == (None if strategy.startswith("ddp") else index + 1)
            ends.append(weights(training.model))
            training.close()
        seen.alike.append((ends[0], ends[1]))
    for limit in (1, 3):
        seen.staleness[limit] = lag_behind(rank, limit, seen)
    go_at_own_speed(rank, seen)
    skip_a_push(rank, seen)
    return seen


def lag_behind(rank: int, limit: int, seen: Seen) -> list[int | None]:
    training = bound(f"async_server:staleness={limit}")
    dice = torch.Generator().manual_seed(rank)
    behind = []
    for index in range(10):
        time.sleep(float(torch.rand(1, generator=dice)) * (0.03 if rank == SLOW_RANK else 0.005))
        behind.append(train_step(training, index).staleness)
    training.synchronize()
    seen.synchronized.append(weights(training.model))
    training.close()
    return behind


def go_at_own_speed(rank: int, seen: Seen) -> None:
    training, done = bound("async_server:mode=asp", "topk:ratio=0.2"), 0
    while done < 10:
        if rank == SLOW_RANK:
            time.sleep(0.3)
        done = train_step(training, seen.own_steps).num_steps or 0
        seen.own_steps += 1
    training.synchronize()
    seen.synchronized.append(weights(training.model))
    training.close()


def skip_a_push(rank: int, seen: Seen) -> None:
    training = bound("async_server:mode=asp", "topk:ratio=0.2")
    for index in range(4):
        before = training.residual_norms()
        outcome = train_step(training, index, poison=rank == 1 and index == 2)
        seen.skipped.append(outcome.skipped)
        if outcome.skipped:
            seen.kept_residual = training.residual_norms() == before
            assert outcome.staleness is None
    training.synchronize()
    seen.synchronized.append(weights(training.model))
    training.close()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return run_ranks(everything, WORLD_SIZE, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", range(len(ALIKE)), ids=[" ".join(case) for case in ALIKE])
def test_a_bound_of_zero_is_synchronous_training_bit_for_bit(case: int, seen: list[Seen]) -> None:
    synchronous = seen[0].alike[case][0]
    assert synchronous != weights(network())
    assert {end for rank in seen for end in rank.alike[case]} == {synchronous}


@pytest.mark.parametrize("limit", [1, 3])
def test_no_gradient_is_staler_than_the_bound(limit: int, seen: list[Seen]) -> None:
    staleness = [versions for rank in seen for versions in rank.staleness[limit]]
    assert len(staleness) == 10 * WORLD_SIZE
    assert all(versions is not None and 0 <= versions <= limit for versions in staleness)
    assert limit in staleness  # the other ranks run ahead of a slow one as far as they may


def test_without_a_bound_nobody_waits_for_a_slow_rank(seen: list[Seen]) -> None:
    counts = [rank.own_steps for rank in seen]
    assert 10 * WORLD_SIZE <= sum(counts) < 11 * WORLD_SIZE  # every rank may have had one more batch in progress
    assert counts[SLOW_RANK] < min(counts[:SLOW_RANK])


def test_a_gradient_that_is_not_finite_costs_its_own_rank_one_push(seen: list[Seen]) -> None:
    assert [rank.skipped for rank in seen] == [[False] * 4, [False, False, True, False], [False] * 4]
    assert seen[1].kept_residual


def test_synchronized_ranks_hold_equal_finite_parameters(seen: list[Seen]) -> None:
    assert len(seen[0].synchronized) == 4
    for weights_of_all in seen[0].synchronized:
        assert np.isfinite(np.frombuffer(weights_of_all, np.float32)).all()
    assert all(rank.synchronized == seen[0].synchronized for rank in seen)


def lose_a_rank(rank: int) -> int | None:
    training = bound("async_server:staleness=1")
    for index in range(1000):
        if rank == 1 and index == 3:
            os._exit(1)
        try:
            train_step(training, index)
        except TransportError as error:
            return error.lost_rank
    return None


def test_a_lost_rank_is_named_by_the_server(tmp_path: Path) -> None:
    assert run_ranks(lose_a_rank, 2, tmp_path, may_die={1}) == [1, None]
