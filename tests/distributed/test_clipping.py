"""Clipping to a norm: several ranks make the steps of one process that clips the mean gradient, as torch does."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.core.config.run import RunConfig
from bench.optimizers.torch_optimizers import Sgd
from bench.strategies.base import Batch, Setup
from bench.strategies.ddp import Ddp
from collectives.allreduce import Native, Ring
from collectives.base import Collective
from compressors.floats import NoCompression
from compressors.layer import Step
from tests.testing.ranks import run_ranks

RANKS, STEPS, CLIP_NORM = 2, 4, 0.5


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(10, 5)


def batch_of(index: int, rank: int) -> torch.Tensor:
    return 10 * torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * index + rank))


def train(rank: int, collective: Collective, skipped: int | None) -> tuple[list[float], list[bool]]:
    config = RunConfig(lr=0.1, bucket_mb=1.0, world_size=RANKS)
    setup = Setup(
        config=config, model=network(), compressor=NoCompression(), collective=collective, optimizer=Sgd(momentum=0.9),
        device=torch.device("cpu"),
    )  # fmt: skip
    strategy = Ddp().bind(setup)
    skips = []
    for index in range(STEPS):
        x = batch_of(index, rank)
        if index == skipped and rank == 1:
            x[0, 0] = torch.nan
        step = Step(index=index, epoch=0, rank=rank, world_size=RANKS, seed=1)
        batch = Batch(x=x, y=torch.arange(4), step=step, lr=0.1, clip_norm=CLIP_NORM, num_parts=2)
        skips.append(strategy.train_step(batch).skipped)
    strategy.close()
    return torch.cat([p.detach().flatten() for p in setup.model.parameters()]).tolist(), skips


def expected(skipped: int | None) -> torch.Tensor:
    """Return the parameters after one process made the same steps with the mean of all ranks' gradients."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for index in range(STEPS):
        if index == skipped:
            continue
        for rank in range(RANKS):
            (nn.functional.cross_entropy(model(batch_of(index, rank)), torch.arange(4)) / RANKS).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        assert norm > 2 * CLIP_NORM  # otherwise the test shows nothing
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in copy.deepcopy(model).parameters()])


@pytest.mark.parametrize("skipped", [None, 1])
@pytest.mark.parametrize("collective", [Ring(), Native()], ids=["hook", "ddp"])
def test_ranks_make_the_steps_of_one_process(collective: Collective, skipped: int | None, tmp_path: Path) -> None:
    (first, skips), (second, _) = run_ranks(train, RANKS, tmp_path, args=[collective, skipped])
    assert first == second
    assert skips == [index == skipped for index in range(STEPS)]
    torch.testing.assert_close(torch.tensor(first), expected(skipped))
