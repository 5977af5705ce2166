"""The strategy `ddp` on two gloo ranks: clipping to a norm, and an optimizer that exchanges values of its own."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typing_extensions import override

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.optimizers.base import Optimizer
from bench.optimizers.torch_optimizers import Sgd
from bench.strategies.base import Batch, BoundStrategy, Setup
from bench.strategies.ddp import Ddp
from compressors.floats import NoCompression
from compressors.layer import Step
from gradwire.exchange.communicator import CompressedCommunicator
from tests.testing.ddp_scenes import weights
from tests.testing.engines import assert_same_on_all_ranks

STEPS, NUMEL, CLIP_NORM = 4, 55, 0.5

pytestmark = pytest.mark.ranks(2)
collectives = pytest.mark.parametrize("collective", ["ring", "native"], ids=["hook", "ddp"])


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(10, 5)


def inputs(index: int, rank: int) -> torch.Tensor:
    return 10 * torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * index + rank))


def bound(model: nn.Module, collective: str, optimizer: Optimizer) -> BoundStrategy:
    parts: Any = {"compressor": NoCompression(), "collective": spec.build("collectives", collective)}
    config = RunConfig(lr=0.1, bucket_mb=1.0, world_size=2)
    return Ddp().bind(Setup(config=config, model=model, optimizer=optimizer, device=torch.device("cpu"), **parts))


def batch(x: torch.Tensor, index: int, rank: int, **options: Any) -> Batch:
    step = Step(index=index, epoch=0, rank=rank, world_size=2, seed=1)
    return Batch(x=x, y=torch.arange(4), step=step, lr=0.1, **options)


@collectives
@pytest.mark.parametrize("skipped", [None, 1])
def test_ranks_that_clip_make_the_steps_of_one_process(rank: int, collective: str, skipped: int | None) -> None:
    model = network()
    strategy = bound(model, collective, Sgd(momentum=0.9))
    for index in range(STEPS):
        x = inputs(index, rank)
        if index == skipped and rank == 1:
            x[0, 0] = torch.nan
        report = strategy.train_step(batch(x, index, rank, clip_norm=CLIP_NORM, num_parts=2))
        assert report.skipped == (index == skipped)
    strategy.close()
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for index in range(STEPS):
        if index != skipped:
            for each in range(2):
                (nn.functional.cross_entropy(alone(inputs(index, each)), torch.arange(4)) / 2).backward()
            assert nn.utils.clip_grad_norm_(alone.parameters(), CLIP_NORM) > 2 * CLIP_NORM
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(weights(model), weights(alone))
    assert_same_on_all_ranks(weights(model))


@dataclasses.dataclass(kw_only=True)
class WithNorms(Optimizer):
    """Plain gradient descent that also exchanges the largest norm of each layer's gradient."""

    default_lr: ClassVar[float] = 0.1

    @property
    @override
    def exchanges(self) -> bool:
        return True

    @override
    def bind(
        self, model: nn.Module, lr: float, communicator: CompressedCommunicator | None = None
    ) -> torch.optim.Optimizer:
        assert communicator is not None
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)

        def exchange(*_: object) -> None:
            ranks = [torch.full((4,), float(communicator.transport.rank)) for _ in communicator.layers]
            communicator.combine_(ranks, "max")

        optimizer.register_step_pre_hook(exchange)
        return optimizer


@collectives
def test_both_exchanges_are_counted_and_ranks_stay_equal(rank: int, collective: str) -> None:
    model = network()
    strategy = bound(model, collective, WithNorms())
    for index in range(STEPS):
        report = strategy.train_step(batch(inputs(index, rank), index, rank))
    traffic = strategy.traffic["gradient"]
    strategy.close()
    assert_same_on_all_ranks(weights(model))
    assert traffic.nbytes == STEPS * (4 * NUMEL + 2 * 4 * 4)  # 2 (n-1)/n of the gradient, and of four numbers per layer
    assert traffic.from_formula == (collective == "native")
    assert len(report.encoded) == 4
