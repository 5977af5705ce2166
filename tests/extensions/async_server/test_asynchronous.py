"""Asynchronous server training over gloo: a bound of 0 equals synchronous training bit for bit; larger bounds hold."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

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
from tests.testing.ddp_scenes import weights
from tests.testing.engines import assert_same_on_all_ranks
from tests.testing.ranks import run_ranks

WORLD_SIZE = 3
three_ranks = pytest.mark.ranks(WORLD_SIZE)
STEPS = 5
LR = 0.05
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


def ended(training: BoundStrategy) -> torch.Tensor:
    """Return the parameters, which are equal on all ranks and finite, and close."""
    training.synchronize()
    training.close()
    found = weights(training.model)
    assert_same_on_all_ranks(found)
    assert found.isfinite().all()
    return found


def gathered(value: int) -> list[int]:
    """Return the numbers of all ranks."""
    numbers = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    numbers[dist.get_rank()] = value
    dist.all_reduce(numbers)
    found: list[int] = numbers.tolist()
    return found


@three_ranks
@pytest.mark.parametrize(
    ("compressor", "optimizer", "options"),  # options of both the server and the strategy
    [
        ("none", "sgd", ""),
        ("none", "adamw", ":root=2"),
        ("fp16", "sgd:nesterov=true,weight_decay=0.01", ""),
        ("topk:ratio=0.1,min_numel=20", "sgd", ""),
        ("sign", "adam", ""),
        ("randomk:ratio=0.2", "sgd", ":root=1"),
    ],
)
def test_a_bound_of_zero_is_synchronous_training_bit_for_bit(
    rank: int, compressor: str, optimizer: str, options: str
) -> None:
    ends = [weights(network())]
    for strategy, collective in (("ddp", f"server{options}"), (f"async_server{options}", "server")):
        training = bound(strategy, compressor, optimizer, collective)
        for index in range(STEPS):
            assert train_step(training, index).num_steps == (None if strategy == "ddp" else index + 1)
        ends.append(weights(training.model))
        training.close()
        assert_same_on_all_ranks(ends[-1])
    assert torch.equal(ends[1], ends[2])
    assert not torch.equal(ends[0], ends[1])


@three_ranks
@pytest.mark.parametrize("limit", [1, 3])
def test_no_gradient_is_staler_than_the_bound(rank: int, limit: int) -> None:
    training, dice = bound(f"async_server:staleness={limit}"), torch.Generator().manual_seed(rank)
    most = 0
    for index in range(10):
        time.sleep(float(torch.rand(1, generator=dice)) * (0.03 if rank == SLOW_RANK else 0.005))
        behind = train_step(training, index).figures.get("staleness")
        assert behind is not None
        assert 0 <= behind <= limit
        most = max(most, behind)
    ended(training)
    assert limit in gathered(most)  # the other ranks run ahead of a slow one as far as they may


@three_ranks
def test_without_a_bound_nobody_waits_for_a_slow_rank(rank: int) -> None:
    training, done, own_steps = bound("async_server:mode=asp", "topk:ratio=0.2"), 0, 0
    while done < 10:
        if rank == SLOW_RANK:
            time.sleep(0.3)
        done = train_step(training, own_steps).num_steps or 0
        own_steps += 1
    ended(training)
    counts = gathered(own_steps)
    assert 10 * WORLD_SIZE <= sum(counts) < 11 * WORLD_SIZE  # every rank may have had one more batch in progress
    assert counts[SLOW_RANK] < min(counts[:SLOW_RANK])


@three_ranks
def test_a_gradient_that_is_not_finite_costs_its_own_rank_one_push(rank: int) -> None:
    training = bound("async_server:mode=asp", "topk:ratio=0.2")
    for index in range(4):
        before, is_bad = training.residual_norms(), rank == 1 and index == 2
        outcome = train_step(training, index, poison=is_bad)
        assert outcome.skipped == is_bad
        if is_bad:
            assert training.residual_norms() == before
            assert outcome.figures == {}
    ended(training)


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
