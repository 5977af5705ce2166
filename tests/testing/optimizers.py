"""Every optimizer of `gradwire.optim` with some options, and a small network that it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gradwire.optim import KFAC, AdaBelief, DeMo, Dion, MaxAdaBelief, Muon, OneBitAdam, ZeroOneAdam
from gradwire.optim.base import BoundOptimizer
from tests.testing.ddp_scenes import weights

Make = Callable[[nn.Module], BoundOptimizer]

# Those that exchange what they need themselves, and those that need averaged gradients.
OWN_GRADIENTS: dict[str, Make] = {
    "dion": lambda model: Dion(model, lr=0.01, collective="ring"),
    "dion_bf16": lambda model: Dion(model, lr=0.01, compressor="bf16"),
    "demo": lambda model: DeMo(model, lr=0.01, k=4),
    "onebit_adam": lambda model: OneBitAdam(model, lr=0.01, warmup_steps=2),
    "zero_one_adam": lambda model: ZeroOneAdam(
        model, lr=0.01, var_freeze_step=3, local_step_scaler=1, local_step_clipper=2
    ),
    "max_adabelief": lambda model: MaxAdaBelief(model, lr=0.01, compressor="topk:ratio=0.5", collective="allgather"),
    "kfac": lambda model: KFAC(model, MaxAdaBelief(model, lr=0.01), collective="ring", update_every=2),
}
MEAN_GRADIENTS: dict[str, Make] = {
    "muon": lambda model: Muon(model, lr=0.01),
    "muon_shard": lambda model: Muon(model, lr=0.01, shard=True),
    "adabelief": lambda model: AdaBelief(model, lr=0.01),
    "kfac_sgd": lambda model: KFAC(model, torch.optim.SGD(model.parameters(), lr=0.01), update_every=2),
}
ALL = OWN_GRADIENTS | MEAN_GRADIENTS


def network(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Linear(12, 3))


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x, y = torch.randn(16, 8, generator=generator), torch.randint(3, (16,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()


def train(model: nn.Module, optimizer: BoundOptimizer, rank: int, steps: range, bad: int | None = None) -> torch.Tensor:
    """Train, and return the parameters that ranks share; in step `bad` rank 1 has a gradient that is not finite."""
    for step in steps:
        backward(model, rank, step)
        if step == bad and rank == 1:
            next(model.parameters()).grad[0] = torch.nan  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()
    optimizer.show_shared()
    found = weights(model)
    optimizer.show_own()
    return found
