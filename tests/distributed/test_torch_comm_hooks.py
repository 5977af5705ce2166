"""PyTorch's own hooks run inside DDP under the names that the registry gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.core import registry
from compressors.families.torch_comm_hook import TorchCommHook
from tests.testing.ranks import run_ranks

RELATIVE_ERROR = {"torch_fp16": 2e-3, "torch_bf16": 2e-2, "torch_powersgd": 1.0}


Steps = list[tuple[list[float], list[float]]]


def train_a_little(rank: int) -> dict[str, Steps]:
    """Per hook and step, the gradient after the hook and the mean of the ranks' own gradients."""
    return {name: four_steps(rank, name) for name in RELATIVE_ERROR}


def four_steps(rank: int, name: str) -> Steps:
    torch.manual_seed(0)
    model, twin = nn.Linear(40, 30), nn.Linear(40, 30)
    ddp = DistributedDataParallel(model)
    compressor = cast(TorchCommHook, registry.load("compressors", name)())
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
