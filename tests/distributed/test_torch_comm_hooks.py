"""PyTorch's own hooks run inside DDP under their names in the registry."""

from __future__ import annotations

import time
from typing import Any, cast

import pytest
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
from tests.testing.ddp_scenes import weights
from tests.testing.engines import assert_same_on_all_ranks
from tests.testing.small_transformer import SmallTransformer, loss_of

RELATIVE_ERROR = {"torch_fp16": 2e-3, "torch_bf16": 2e-2, "torch_powersgd": 1.0}


pytestmark = pytest.mark.ranks(2)
hooks = pytest.mark.parametrize("name", RELATIVE_ERROR)


def in_ddp(name: str, model: nn.Module) -> DistributedDataParallel:
    ddp = DistributedDataParallel(model)
    compressor = cast(TorchHook, registry.load("compressors", name)())
    ddp.register_comm_hook(*compressor.hook(cast(Any, dist.group.WORLD)))
    return ddp


@hooks
def test_gradients_are_the_mean_over_ranks(rank: int, name: str) -> None:
    torch.manual_seed(0)
    model, twin = nn.Linear(40, 30), nn.Linear(40, 30)
    ddp = in_ddp(name, model)
    twin.load_state_dict(model.state_dict())
    for step in range(4):
        inputs = torch.randn(16, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        for module in (ddp, twin):
            module.zero_grad()
            module(inputs).square().sum().backward()
        hooked, mean = cast(torch.Tensor, model.weight.grad), cast(torch.Tensor, twin.weight.grad)
        dist.all_reduce(mean)
        mean /= 2
        assert_same_on_all_ranks(hooked)
        error = float((hooked - mean).norm() / mean.norm())
        if name == "torch_powersgd" and step < 2:
            assert error < 1e-6
        else:
            assert 1e-6 < error < RELATIVE_ERROR[name]


@hooks
def test_they_train_a_transformer_with_ranks_in_sync(rank: int, name: str) -> None:
    torch.manual_seed(0)
    model = SmallTransformer()
    ddp, optimizer = in_ddp(name, model), torch.optim.SGD(model.parameters(), lr=0.3)
    before = float(loss_of(model, 100, 0).detach())  # on unseen lines
    for step in range(20):
        loss_of(ddp, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_on_all_ranks(weights(model))
    assert float(loss_of(model, 100, 0).detach()) < 0.9 * before


def test_what_is_not_finite_is_forgotten_and_factors_are_what_is_sent(rank: int) -> None:
    dense, factors = 40 * 30, 2 * (40 + 30)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    exchange = DdpExchange(ddp, TorchPowerSgd(), nonfinite="skip")
    for index in range(6):
        ddp.zero_grad()
        exchange.start_step(step_at(index, rank, 2))
        inputs = torch.full((16, 40), torch.nan if (rank, index) == (0, 3) else float(index + 1))
        ddp(inputs).square().sum().backward()
        outcome = exchange.finish_step()
        assert outcome.skipped == (index == 3)
        assert outcome.encoded[0].num_entries == (dense if index < 2 else factors)


LATE_S = 1.0


def test_ddps_timers_are_those_of_the_step_that_is_read(rank: int) -> None:
    """Rank 1 is late in the one step for which DDP's timers are read."""
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    exchange = DdpExchange(ddp, NoCompression(), nonfinite="skip")
    for index in range(DDP_TIMER_EVERY):
        is_read = index == DDP_TIMER_EVERY - 1
        exchange.start_step(step_at(index, rank, 2))
        loss = ddp(torch.ones(16, 40)).sum()
        if rank == 1 and is_read:
            time.sleep(LATE_S)
        loss.backward()
        waited_s = exchange.finish_step().exposed_s
        assert (waited_s is not None) == is_read
    assert waited_s is not None
    assert rank == 1 or waited_s > LATE_S / 4
