"""Kept gradients: they are not sent, and a NaN on one rank affects all ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from bench.core import spec
from bench.strategies.base import Batch
from bench.strategies.ddp import OwnGradients
from collectives.allreduce import Ring
from compressors.floats import NoCompression
from compressors.layer import layers_of
from gradwire.exchange.communicator import CompressedCommunicator, Trigger
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import StepReport
from gradwire.optim.base import BoundOptimizer
from gradwire.step_guard import Nonfinite
from tests.testing.compressor_cases import step_at
from tests.testing.memory_transport import MemoryTransport, run_threads


class Averaging(BoundOptimizer):
    """An optimizer that averages every gradient over the ranks in its step."""

    def __init__(self, model: nn.Module, channel: CompressedCommunicator) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self._channel = channel

    def update(self) -> None:
        parameters = self.param_groups[0]["params"]
        self._channel.mean_([parameter.grad for parameter in parameters])
        torch.optim.SGD(parameters, self.param_groups[0]["lr"]).step()


@dataclasses.dataclass(frozen=True, kw_only=True)
class GivenGradient(Batch):
    """A batch with a given gradient."""

    gradient: torch.Tensor

    def backward(self, network: nn.Module, accumulating: object = None) -> None:
        network.weight.grad = self.gradient  # type: ignore[assignment]


def train_step(
    strategy: OwnGradients, index: int, rank: int, gradient: torch.Tensor, clip_norm: float | None = None
) -> StepReport:
    nothing, step = torch.empty(0), step_at(index, rank, 2)
    return strategy.train_step(
        GivenGradient(x=nothing, y=nothing, step=step, lr=1.0, clip_norm=clip_norm, gradient=gradient)
    )


def replicas(transport: MemoryTransport, nonfinite: Nonfinite, trigger: Trigger = "async") -> OwnGradients:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    channel = CompressedCommunicator(layers_of(model), reducer_for(NoCompression()), Ring(), transport)
    return OwnGradients(model, channel, Averaging(model, channel), trigger=trigger, nonfinite=nonfinite)


@pytest.mark.parametrize(
    ("nonfinite", "skipped", "weights"),
    [("skip", True, [0.0, 0.0]), ("raise", True, [0.0, 0.0]), ("zero", False, [-1.5, -1.0])],
)
def test_all_ranks_leave_out_a_step_that_one_cannot_make(
    nonfinite: Nonfinite, skipped: bool, weights: list[float]
) -> None:
    def train(transport: MemoryTransport) -> None:
        strategy = replicas(transport, nonfinite)
        bad = float("nan") if transport.rank == 1 else 2.0
        report = train_step(strategy, 0, transport.rank, torch.tensor([[1.0 + transport.rank, bad]]))
        assert report.skipped is skipped
        assert strategy.model.weight.tolist() == [weights]  # type: ignore[union-attr, operator]
        assert strategy.traffic["gradient"].nbytes == (0 if skipped else 8)
        assert len(report.encoded) == (0 if skipped else 1)

    run_threads(train, 2)


def test_every_rank_clips_its_own_gradient_before_the_optimizer_sends() -> None:
    def train(transport: MemoryTransport) -> torch.Tensor:
        strategy = replicas(transport, "skip")
        gradient = torch.tensor([[[3.0, 4.0]], [[0.0, 0.5]]][transport.rank])
        train_step(strategy, 0, transport.rank, gradient, clip_norm=1.0)
        return strategy.model.weight.detach()  # type: ignore[union-attr, operator]

    for weight in run_threads(train, 2):
        torch.testing.assert_close(weight, -torch.tensor([[0.6 + 0.0, 0.8 + 0.5]]) / 2)


@pytest.mark.parametrize(
    ("text", "num_held"),
    [
        ("demo", 8 * 16 + 4 * 8),
        ("onebit_adam", 8 * 16 + 4 * 8 + (8 * 16 + 4 * 8) // 2),  # and of the half that the rank owns
        ("dion", 8 * 16),
        ("max_adabelief", 0),
    ],
)
def test_what_an_optimizer_has_not_sent_is_held_memory(text: str, num_held: int) -> None:
    def train(transport: MemoryTransport) -> None:
        model = nn.Sequential(nn.Linear(16, 8, bias=False), nn.Linear(8, 4, bias=False))
        channel = CompressedCommunicator(layers_of(model), reducer_for(NoCompression()), Ring(), transport)
        optimizer = spec.build("optimizers", text).bind(model, 0.1, channel)
        strategy = OwnGradients(model, channel, optimizer, trigger="async", nonfinite="skip")
        if text == "onebit_adam":  # what it keeps for its own part begins with the first mean
            optimizer.average_bits_(torch.ones(8 * 16 + 4 * 8), None)
        assert strategy.held_bytes == 4 * num_held

    run_threads(train, 2)


class Alone(Averaging):
    """An optimizer that notes which parameters it is asked to show."""

    def __init__(self, model: nn.Module, channel: CompressedCommunicator) -> None:
        super().__init__(model, channel)
        self.shown: list[str] = []

    def show_shared(self) -> None:
        self.shown.append("shared")

    def show_own(self) -> None:
        self.shown.append("own")


def test_a_rank_returns_to_its_own_parameters_after_a_pause_only() -> None:
    def train(transport: MemoryTransport) -> None:
        strategy = replicas(transport, "skip")
        strategy.optimizer = optimizer = Alone(strategy.model, strategy.exchanges[0])  # type: ignore[arg-type]
        for index in range(4):
            if index == 2:
                strategy.synchronize()
            train_step(strategy, index, transport.rank, torch.ones(1, 2))
        assert optimizer.shown == ["shared", "own"]
        strategy.load_state_dict(strategy.state_dict())
        train_step(strategy, 5, transport.rank, torch.ones(1, 2))
        assert optimizer.shown == ["shared", "own", "own"]

    run_threads(train, 2)


def test_what_the_optimizer_sends_is_part_of_the_step() -> None:
    def train(transport: MemoryTransport) -> None:
        strategy = replicas(transport, "skip", "sync")
        for index in range(2):
            report = train_step(strategy, index, transport.rank, torch.ones(1, 2))
            assert strategy.traffic["control"].nbytes == (index + 1) * 9  # a vote, and a message of the trigger
            assert report.exposed_s is not None
            assert report.update_s > report.update_exposed_s > 0
            assert report.exposed_s > report.update_exposed_s
            assert [encoded.layer.name for encoded in report.encoded] == ["weight"]
        assert strategy.residual_norms() == {}
        assert strategy.last_encoded == {}
        strategy.exchanges[0].close()

    run_threads(train, 2)
