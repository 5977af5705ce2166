"""Kept gradients: nothing of them is sent, and one rank's NaN is everybody's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bench.optimizers.torch_optimizers import Sgd
from bench.strategies.ddp.ddp import WithOptimizer
from bench.strategies.ddp.replicas import KeptGradients, Replicas
from collectives.ring import Ring
from compressors.ddp.communicator import CompressedCommunicator, Nonfinite, Trigger
from compressors.ddp.reducer import reducer_for
from compressors.layer import layers_of
from compressors.none import NoCompression
from tests.testing.compressor_cases import step_at
from tests.testing.memory_transport import MemoryTransport, run_threads


class Averaging(torch.optim.Optimizer):
    """Takes the mean over ranks of every gradient in its step."""

    def __init__(self, model: nn.Module, channel: CompressedCommunicator) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self._channel = channel

    def step(self) -> None:  # type: ignore[override]
        parameters = self.param_groups[0]["params"]
        self._channel.mean_([parameter.grad for parameter in parameters])
        Sgd(momentum=0).build(parameters, self.param_groups[0]["lr"]).step()


def replicas(transport: MemoryTransport, nonfinite: Nonfinite, trigger: Trigger = "async") -> Replicas:
    model = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(model.weight)
    channel = CompressedCommunicator(layers_of(model), reducer_for(NoCompression()), Ring(), transport)
    kept = KeptGradients(model, channel, trigger=trigger, nonfinite=nonfinite)
    return Replicas(model, model, WithOptimizer(kept, channel), Averaging(model, channel), channel)


@pytest.mark.parametrize(
    ("nonfinite", "skipped", "weights"),
    [("skip", True, [0.0, 0.0]), ("raise", True, [0.0, 0.0]), ("zero", False, [-1.5, -1.0])],
)
def test_all_ranks_leave_out_a_step_that_one_cannot_make(
    nonfinite: Nonfinite, skipped: bool, weights: list[float]
) -> None:
    def train(transport: MemoryTransport) -> None:
        strategy = replicas(transport, nonfinite)
        strategy.start_step(step_at(0, transport.rank, 2), 1.0)
        bad = float("nan") if transport.rank == 1 else 2.0
        strategy.model.weight.grad = torch.tensor([[1.0 + transport.rank, bad]])  # type: ignore[union-attr]
        outcome = strategy.finish_step()
        assert outcome.skipped is skipped
        assert strategy.exchange.traffic["gradient"].nbytes == 0
        assert strategy.update(outcome) == 1
        assert strategy.model.weight.tolist() == [weights]  # type: ignore[union-attr, operator]
        assert strategy.exchange.traffic["gradient"].nbytes == (0 if skipped else 8)
        assert len(outcome.encoded) == (0 if skipped else 1)

    run_threads(train, 2)


def test_what_the_optimizer_sends_is_part_of_the_step() -> None:
    def train(transport: MemoryTransport) -> None:
        strategy = replicas(transport, "skip", "sync")
        for index in range(2):
            strategy.start_step(step_at(index, transport.rank, 2), 1.0)
            strategy.model.weight.grad = torch.ones(1, 2)
            outcome = strategy.finish_step()
            before = outcome.exposed_s
            assert strategy.exchange.traffic["control"].nbytes == (index + 1) * 9  # a vote, and a word of the trigger
            strategy.update(outcome)
            assert before is not None
            assert outcome.exposed_s is not None
            assert outcome.exposed_s > before > 0
            assert [encoded.layer.name for encoded in outcome.encoded] == ["weight"]
        assert strategy.exchange.residual_norms() == {}
        assert strategy.exchange.last_encoded == {}
        strategy.close()

    run_threads(train, 2)
