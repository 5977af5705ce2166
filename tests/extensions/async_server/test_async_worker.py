"""Every compressor pushes layer by layer to a server that updates the parameters, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast
from unittest.mock import MagicMock, call

import pytest
import torch
from torch import nn

from bench.core import registry, spec
from bench.extensions.async_server.server import ParameterServer
from bench.extensions.async_server.strategy import AsyncTraining, ServerParameters
from bench.extensions.async_server.worker import AsyncWorker
from bench.optimizers.base import Optimizer
from collectives.payloads.base import unpack
from compressors.base import Compressor, PerLayer
from compressors.layer import Step, layers_of
from gradwire.exchange.reducer import reducer_for
from gradwire.exchange.report import StepReport
from gradwire.step_guard import Nonfinite, StepGuard
from tests.testing.limits import LIMIT_S

STEPS = 5


def compressors() -> list[str]:
    """Return all compressors that need neither other ranks while they encode nor the whole model in one bucket."""
    names = []
    for name in registry.entries("compressors"):
        compressor = cast(Compressor, spec.build("compressors", name))
        if isinstance(compressor, PerLayer) and not (compressor.traits.needs_all_ranks or compressor.traits.one_bucket):
            names.append(name)
    return names


class Constant(nn.Module):
    """A model with constant gradients and zero weights, so that updates are not lost in rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 4, 3)
        self.linear = nn.Linear(40, 10)
        self.slopes = [torch.randn(parameter.shape) for parameter in self.parameters()]
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, factors: torch.Tensor) -> torch.Tensor:
        """Return a loss for which the gradient of layer i is factors[i] times its slope."""
        products = [(p * s).sum() for p, s in zip(self.parameters(), self.slopes, strict=True)]
        return (factors * torch.stack(products)).sum()


class Training:
    """One worker and its server in one process, plain SGD with a learning rate of 1."""

    def __init__(self, compressor: str, nonfinite: Nonfinite) -> None:
        self.model = Constant()
        self.compressor = cast(Compressor, spec.build("compressors", compressor))
        self.reducer = reducer_for(self.compressor)
        layers = layers_of(self.model)
        optimizer = cast(Optimizer, spec.build("optimizers", "sgd:momentum=0"))
        self.parameters = ServerParameters(layers, self.compressor, optimizer, lr=1.0, world_size=1, seed=1)
        session = ParameterServer(self.parameters, 1, LIMIT_S, staleness=None).join(0)
        self.worker = AsyncWorker(self.reducer, session, layers, links=(), guard=StepGuard(nonfinite))
        self._index = 0

    def step(self, factor: float = 1.0, layer_id: int = 0) -> StepReport:
        """Make one step in which one layer's gradient is multiplied by a factor."""
        where = Step(index=self._index, epoch=0, rank=0, world_size=1, seed=1, warmup=False)
        self._index += 1
        self.worker.start_step(where, 1.0)
        factors = torch.ones(len(self.model.slopes))
        factors[layer_id] = factor
        self.model(factors).backward()
        outcome = self.worker.finish_step()
        self.model.zero_grad()
        return outcome

    def weights(self) -> list[torch.Tensor]:
        return [unpack(packed).to_dense() for packed in self.parameters.packed()]


@contextmanager
def training(compressor: str, nonfinite: Nonfinite = "skip") -> Iterator[Training]:
    made = Training(compressor, nonfinite)
    try:
        yield made
    finally:
        made.worker.close()


@pytest.mark.parametrize("name", compressors())
def test_what_was_applied_and_what_waits_is_the_gradient(name: str) -> None:
    with training(name) as run:
        outcomes = [run.step() for _ in range(STEPS)]
        weights = run.weights()
        residuals = run.reducer.state_dict()["residuals"]
    assert all(bool(torch.isfinite(w).all()) and bool(w.any()) for w in weights)
    for outcome in outcomes:
        assert {sent.layer.id for sent in outcome.encoded} == set(range(len(weights)))
        assert outcome.figures == {"staleness": 0}
    if run.compressor.traits.keeps_residual and not run.compressor.traits.owns_momentum:
        for layer_id, (weight, slope) in enumerate(zip(weights, run.model.slopes, strict=True)):
            waiting = residuals.get(layer_id, torch.zeros_like(weight))
            torch.testing.assert_close(waiting - weight, STEPS * slope.flatten(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["none", "topk:ratio=0.1", "sign"])
def test_a_skipped_push_leaves_server_and_residuals_as_they_were(name: str) -> None:
    with training(name) as run:
        pushed_last = run.step().encoded[-1].layer.id
        before, residuals = run.weights(), run.reducer.state_dict()["residuals"]
        outcome = run.step(float("nan"), pushed_last)
        assert len(outcome.encoded) == len(before) - 1  # earlier pushes of the step are taken back
        assert outcome.skipped
        assert outcome.figures == {}
        assert all(torch.equal(a, b) for a, b in zip(run.weights(), before, strict=True))
        after = run.reducer.state_dict()["residuals"]
        assert all(torch.equal(after[layer_id], residual) for layer_id, residual in residuals.items())
        assert not run.step().skipped
        assert not any(torch.equal(a, b) for a, b in zip(run.weights(), before, strict=True))


def test_zeroing_goes_on_without_what_is_not_finite() -> None:
    with training("none", "zero") as run:
        assert not run.step(float("inf"), layer_id=2).skipped
        assert [bool(weight.any()) for weight in run.weights()] == [True, True, False, True]
        assert not run.step().skipped
        assert all(bool(weight.any()) for weight in run.weights())


def test_a_failure_in_the_thread_reaches_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with training("topk") as run:
        monkeypatch.setattr(run.compressor, "encode_bucket", lambda *_, screen: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step()


def test_ranks_that_go_at_their_own_speed_wait_for_the_slowest_before_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.distributed.barrier", lambda: None)
    training = MagicMock(spec=AsyncTraining, _server=None, model=MagicMock(), exchanges=(), optimizer=None)
    AsyncTraining.state_dict(training)
    assert training.mock_calls[0] == call.synchronize()
