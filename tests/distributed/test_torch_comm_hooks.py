"""PyTorch's own hooks run inside DDP under their names in the registry."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.core import registry
from bench.strategies.ddp import DDP_TIMER_EVERY, DdpExchange
from compressors.base import TorchHook
from compressors.floats import NoCompression
from compressors.torch_hooks import TorchPowerSgd
from tests.testing.compressor_cases import step_at
from tests.testing.ranks import run_ranks
from tests.testing.small_transformer import SmallTransformer, loss_of

RELATIVE_ERROR = {"torch_fp16": 2e-3, "torch_bf16": 2e-2, "torch_powersgd": 1.0}


Steps = list[tuple[list[float], list[float]]]


def train_a_little(rank: int) -> dict[str, Steps]:
    """Return, per hook and step, the gradient after the hook and the mean of the ranks' own gradients."""
    return {name: four_steps(rank, name) for name in RELATIVE_ERROR}


def four_steps(rank: int, name: str) -> Steps:
    torch.manual_seed(0)
    model, twin = nn.Linear(40, 30), nn.Linear(40, 30)
    ddp = DistributedDataParallel(model)
    compressor = cast(TorchHook, registry.load("compressors", name)())
    ddp.register_comm_hook(*compressor.hook(cast(Any, dist.group.WORLD)))
    twin.load_state_dict(model.state_dict())
    steps = []
    for step in range(4):
        inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        for module in (ddp, twin):
            module.zero_grad()
            module(inputs).square().sum().backward()
        assert model.weight.grad is not None
        assert twin.weight.grad is not None
        dist.all_reduce(twin.weight.grad)
        steps.append((model.weight.grad.view(-1).tolist(), twin.weight.grad.view(-1).div(2).tolist()))
    return steps


def test_gradients_are_the_mean_over_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(train_a_little, 2, tmp_path)
    for name, most in RELATIVE_ERROR.items():
        for index, ((hooked, mean), (other, _)) in enumerate(zip(first[name], second[name], strict=True)):
            assert hooked == other
            wanted = torch.tensor(mean)
            error = float((torch.tensor(hooked) - wanted).norm() / wanted.norm())
            if name == "torch_powersgd" and index < 2:
                assert error < 1e-6
            else:
                assert 1e-6 < error < most


def trained_transformers(rank: int) -> dict[str, tuple[float, float, list[float]]]:
    """Return, per hook, the loss on unseen lines before and after 20 steps, and the weights."""
    found = {}
    for name in RELATIVE_ERROR:
        torch.manual_seed(0)
        model = SmallTransformer()
        ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.3)
        compressor = cast(TorchHook, registry.load("compressors", name)())
        ddp.register_comm_hook(*compressor.hook(cast(Any, dist.group.WORLD)))
        before = float(loss_of(model, 100, 0).detach())
        for step in range(20):
            loss_of(ddp, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        found[name] = before, float(loss_of(model, 100, 0).detach()), weights.tolist()
    return found


def test_they_train_a_transformer_with_ranks_in_sync(tmp_path: Path) -> None:
    first, second = run_ranks(trained_transformers, 2, tmp_path)
    assert first == second
    assert all(after < 0.9 * before for before, after, _ in first.values())


def steps_around_one_that_is_not_finite(rank: int) -> list[tuple[bool, int]]:
    """Return, per step, whether it is skipped and how many numbers of the weight are sent; rank 0's step 3 is NaN."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    exchange = DdpExchange(ddp, TorchPowerSgd(), nonfinite="skip")
    found = []
    for index in range(6):
        ddp.zero_grad()
        exchange.start_step(step_at(index, rank, 2))
        inputs = torch.full((16, 40), torch.nan if (rank, index) == (0, 3) else float(index + 1))
        ddp(inputs).square().sum().backward()
        outcome = exchange.finish_step()
        found.append((outcome.skipped, outcome.encoded[0].num_entries))
    return found


def test_what_is_not_finite_is_forgotten_and_factors_are_what_is_sent(tmp_path: Path) -> None:
    dense, factors = 40 * 30, 2 * (40 + 30)
    expected = [(False, dense)] * 2 + [(False, factors), (True, factors), (False, factors), (False, factors)]
    assert run_ranks(steps_around_one_that_is_not_finite, 2, tmp_path) == [expected] * 2


LATE_S = 1.0


def waits_for_a_late_peer(rank: int) -> list[float | None]:
    """Return the waiting time of each step; rank 1 is late in the one step for which DDP's timers are read."""
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    exchange = DdpExchange(ddp, NoCompression(), nonfinite="skip")
    found = []
    for index in range(DDP_TIMER_EVERY):
        exchange.start_step(step_at(index, rank, 2))
        loss = ddp(torch.ones(16, 40)).sum()
        if rank == 1 and index == DDP_TIMER_EVERY - 1:
            time.sleep(LATE_S)
        loss.backward()
        found.append(exchange.finish_step().exposed_s)
    return found


def test_ddps_timers_are_those_of_the_step_that_is_read(tmp_path: Path) -> None:
    *before, waited_s = run_ranks(waits_for_a_late_peer, 2, tmp_path)[0]
    assert before == [None] * (DDP_TIMER_EVERY - 1)
    assert waited_s is not None
    assert waited_s > LATE_S / 4
