"""Asynchronous server training over gloo: a bound of 0 is synchronous training bit for bit; what holds beyond it."""

from __future__ import annotations

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
from bench.train.engine import Engine, build_engine
from collectives.transport.base import TransportError
from compressors.ddp.communication_thread import Outcome
from compressors.layer import Step
from tests.testing.configs import make_config
from tests.testing.ranks import run_ranks

WORLD_SIZE = 3
STEPS = 5
LR = 0.05
# (compressor, optimizer, options of the server beside mode)
ALIKE = [
    ("none", "sgd", ""),
    ("none", "adamw", ",root=2"),
    ("fp16", "sgd:nesterov=true,weight_decay=0.01", ""),
    ("topk:ratio=0.1,min_numel=20", "sgd", ""),
    ("sign", "adam", ""),
    ("randomk:ratio=0.2", "sgd", ",root=1"),
]
SLOW_RANK = 2


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10), nn.ReLU(), nn.Linear(10, 3))


def engine_of(collective: str, compressor: str = "none", optimizer: str = "sgd", timeout_s: float = 30.0) -> Engine:
    config = make_config(world_size=dist.get_world_size(), lr=LR, timeout_s=timeout_s)
    parts: list[Any] = [
        spec.build(kind, text)
        for kind, text in (("compressors", compressor), ("collectives", collective), ("optimizers", optimizer))
    ]
    return build_engine(config, network(), *parts, torch.device("cpu"))


def train_step(engine: Engine, index: int, *, poison: bool = False) -> tuple[Outcome, int]:
    """One step on data that differ between ranks and steps, with a learning rate that falls."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + index)
    x, y = torch.randn(5, 1, 8, 8, generator=generator), torch.randint(3, (5,), generator=generator)
    where = Step(index=index, epoch=0, rank=dist.get_rank(), world_size=dist.get_world_size(), seed=1, warmup=False)
    engine.start_step(where, LR / (index + 1))
    loss = nn.functional.cross_entropy(engine.ddp(x), y)
    (loss * float("nan") if poison else loss).backward()
    outcome = engine.finish_step()
    return outcome, engine.update(outcome)


def weights(model: nn.Module) -> bytes:
    """All parameters, bit for bit; not a tensor, which would live in memory of the process that ends."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy().tobytes()


def close(engine: Engine) -> None:
    dist.barrier()
    engine.close()
    dist.barrier()


@dataclasses.dataclass
class Seen:
    """What one rank saw in all cases."""

    alike: list[tuple[bytes, bytes]] = dataclasses.field(default_factory=list)
    staleness: dict[int, list[int | None]] = dataclasses.field(default_factory=dict)
    own_steps: int = 0
    settled: list[bytes] = dataclasses.field(default_factory=list)
    skipped: list[bool] = dataclasses.field(default_factory=list)
    kept_residual: bool = False


def everything(rank: int) -> Seen:
    seen = Seen()
    for compressor, optimizer, options in ALIKE:
        ends = []
        for collective in (f"server:mode=bsp{options}", f"server:mode=ssp{options}"):
            engine = engine_of(collective, compressor, optimizer)
            for index in range(STEPS):
                assert train_step(engine, index)[1] == index + 1
            ends.append(weights(engine.model))
            close(engine)
        seen.alike.append((ends[0], ends[1]))
    for bound in (1, 3):
        seen.staleness[bound] = lag_behind(rank, bound, seen)
    go_at_own_speed(rank, seen)
    skip_a_push(rank, seen)
    return seen


def lag_behind(rank: int, bound: int, seen: Seen) -> list[int | None]:
    engine = engine_of(f"server:mode=ssp,staleness={bound}")
    dice = torch.Generator().manual_seed(rank)
    behind = []
    for index in range(10):
        time.sleep(float(torch.rand(1, generator=dice)) * (0.03 if rank == SLOW_RANK else 0.005))
        behind.append(train_step(engine, index)[0].staleness)
    engine.settle()
    seen.settled.append(weights(engine.model))
    close(engine)
    return behind


def go_at_own_speed(rank: int, seen: Seen) -> None:
    engine, done = engine_of("server:mode=asp", "topk:ratio=0.2"), 0
    while done < 10:
        if rank == SLOW_RANK:
            time.sleep(0.3)
        done = train_step(engine, seen.own_steps)[1]
        seen.own_steps += 1
    engine.settle()
    seen.settled.append(weights(engine.model))
    close(engine)


def skip_a_push(rank: int, seen: Seen) -> None:
    engine = engine_of("server:mode=asp", "topk:ratio=0.2")
    for index in range(4):
        before = engine.residual_norms()
        outcome, _ = train_step(engine, index, poison=rank == 1 and index == 2)
        seen.skipped.append(outcome.skipped)
        if outcome.skipped:
            seen.kept_residual = engine.residual_norms() == before
            assert outcome.staleness is None
    engine.settle()
    seen.settled.append(weights(engine.model))
    close(engine)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return run_ranks(everything, WORLD_SIZE, tmp_path_factory.mktemp("ranks"), timeout_s=110.0)


@pytest.mark.parametrize("case", range(len(ALIKE)), ids=[" ".join(case) for case in ALIKE])
def test_a_bound_of_zero_is_synchronous_training_bit_for_bit(case: int, seen: list[Seen]) -> None:
    synchronous = seen[0].alike[case][0]
    assert synchronous != weights(network())
    assert {end for rank in seen for end in rank.alike[case]} == {synchronous}


@pytest.mark.parametrize("bound", [1, 3])
def test_no_gradient_is_staler_than_the_bound(bound: int, seen: list[Seen]) -> None:
    staleness = [versions for rank in seen for versions in rank.staleness[bound]]
    assert len(staleness) == 10 * WORLD_SIZE
    assert all(versions is not None and 0 <= versions <= bound for versions in staleness)
    assert bound in staleness  # a slow rank lets the others run ahead as far as they may


def test_without_a_bound_nobody_waits_for_a_slow_rank(seen: list[Seen]) -> None:
    counts = [rank.own_steps for rank in seen]
    assert 10 * WORLD_SIZE <= sum(counts) < 11 * WORLD_SIZE  # every rank may have had one batch under way
    assert counts[SLOW_RANK] < min(counts[:SLOW_RANK])


def test_a_gradient_that_is_not_finite_costs_its_own_rank_one_push(seen: list[Seen]) -> None:
    assert [rank.skipped for rank in seen] == [[False] * 4, [False, False, True, False], [False] * 4]
    assert seen[1].kept_residual


def test_settled_ranks_hold_equal_finite_parameters(seen: list[Seen]) -> None:
    assert len(seen[0].settled) == 4
    for settled in seen[0].settled:
        assert np.isfinite(np.frombuffer(settled, np.float32)).all()
    assert all(rank.settled == seen[0].settled for rank in seen)


def lose_a_rank(rank: int) -> int | None:
    engine = engine_of("server:mode=ssp,staleness=1")
    for index in range(1000):
        if rank == 1 and index == 3:
            os._exit(1)
        try:
            train_step(engine, index)
        except TransportError as error:
            return error.lost_rank
    return None


def test_a_lost_rank_is_named_by_the_server(tmp_path: Path) -> None:
    assert run_ranks(lose_a_rank, 2, tmp_path, timeout_s=100.0, may_die={1}) == [1, None]
