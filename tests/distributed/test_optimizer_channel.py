"""An optimizer that exchanges values in addition to the gradients, under DDP and its hook, on real gloo ranks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.optimizers.base import Optimizer
from bench.strategies.base import Batch, Setup
from bench.strategies.ddp import Ddp
from collectives.allreduce import Native, Ring
from collectives.base import Collective
from compressors.floats import NoCompression
from compressors.layer import Step
from gradwire.exchange.communicator import CompressedCommunicator
from tests.testing.ranks import run_ranks

STEPS, NUMEL = 3, 55


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


def train(rank: int, collective: Collective) -> tuple[list[float], dict[str, Any]]:
    torch.manual_seed(3)
    config = RunConfig(lr=0.1, bucket_mb=1.0, world_size=2)
    model = nn.Linear(10, 5)
    setup = Setup(
        config=config, model=model, compressor=NoCompression(), collective=collective, optimizer=WithNorms(),
        device=torch.device("cpu"),
    )  # fmt: skip
    strategy = Ddp().bind(setup)
    for index in range(STEPS):
        x = torch.randn(4, 10, generator=torch.Generator().manual_seed(10 * index + rank))
        step = Step(index=index, epoch=0, rank=rank, world_size=2, seed=1)
        report = strategy.train_step(Batch(x=x, y=torch.arange(4), step=step, lr=0.1))
    figures = {
        "gradient": strategy.traffic["gradient"].nbytes,
        "from_formula": strategy.traffic["gradient"].from_formula,
        "encoded": len(report.encoded),
    }
    strategy.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(), figures


@pytest.mark.parametrize("collective", [Ring(), Native()], ids=["hook", "ddp"])
def test_both_exchanges_are_counted_and_ranks_stay_equal(collective: Collective, tmp_path: Path) -> None:
    (first, figures), (second, _) = run_ranks(train, 2, tmp_path, args=[collective])
    assert first == second
    assert figures == {
        "gradient": STEPS * (4 * NUMEL + 2 * 4 * 4),  # 2 (n-1)/n of the gradient, and of four numbers per layer
        "from_formula": isinstance(collective, Native),
        "encoded": 4,
    }
