"""Replicas: every rank applies the same update to its own copy of the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from bench.strategies.base import BoundStrategy, Exchange
from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from compressors.ddp.communicator import CompressedCommunicator, Nonfinite, Trigger, await_command, zero_nonfinite_
from compressors.ddp.hook import CompressionHook
from compressors.ddp.report import StepReport
from compressors.layer import Step


def wrap(model: nn.Module, device: torch.device, bucket_mb: float) -> DistributedDataParallel:
    """Wrap the model in DDP, without a broadcast: ranks start from one seed and compare hashes of the weights."""
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        init_sync=False,
    )


class GradientExchange(Exchange, Protocol):
    """The exchange of a backward's gradients."""

    def start_step(self, step: Step) -> None:
        """Set the current step; call before `backward`."""


class Replicas(BoundStrategy):
    """Train a copy of the network on every rank, with the same gradients and an optimizer on each.

    Args:
        model: the bare network.
        wrapped: the model wrapped in DDP, or `model` itself if no gradients are sent.
        exchange: sums the gradients, and counts what the optimizer sends.
        optimizer: updates the model's parameters.
        channel: carries what the optimizer exchanges in its `step`; None if it exchanges nothing.
    """

    exchange: GradientExchange

    def __init__(
        self,
        model: nn.Module,
        wrapped: nn.Module,
        exchange: GradientExchange,
        optimizer: torch.optim.Optimizer,
        channel: CompressedCommunicator | None = None,
    ) -> None:
        super().__init__(model, wrapped, exchange)
        self.optimizer = optimizer
        self._channel = channel
        self._num_steps = 0

    @override
    def end_pause(self) -> None:
        if isinstance(self.exchange, CompressionHook):
            self.exchange.end_pause()

    @override
    def start_step(self, step: Step, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.exchange.start_step(step)

    @override
    def accumulating(self) -> AbstractContextManager[object]:
        if isinstance(self.wrapped, DistributedDataParallel):
            return self.wrapped.no_sync()
        return super().accumulating()

    @override
    def update(self, outcome: StepReport) -> int:
        if not outcome.skipped:
            self.optimizer.step()
            if self._channel is not None:
                outcome.add(self._channel.finish_step())
        self.optimizer.zero_grad()  # sets them to None, so DDP copies the next gradients into its buckets, not adds
        self._num_steps += 1
        return self._num_steps

    @override
    def synchronize(self) -> None:
        """Do nothing: replicas are equal after every step."""

    @override
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "optimizer": self.optimizer.state_dict(), "num_steps": self._num_steps}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self._num_steps = state["num_steps"]

    @override
    def warm_up(self, step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        """Run one forward and backward: DDP rebuilds its buckets after the first, and rounding depends on buckets."""
        if isinstance(self.wrapped, DistributedDataParallel):
            self.exchange.start_step(step)
            self.backward(self.forward(x, y))
            self.finish_step()
            self.optimizer.zero_grad()


class KeptGradients:
    """Exchange no gradients: ranks only vote on whether all gradients are finite.

    With the sync trigger they also wait until all ranks have finished backward.

    Args:
        model: the bare network.
        channel: the optimizer's channel, which carries and counts the votes.
        trigger: with "sync", a rank continues when rank 0 has seen all ranks finish backward.
        nonfinite: what to do about a non-finite gradient.
    """

    def __init__(
        self, model: nn.Module, channel: CompressedCommunicator, *, trigger: Trigger, nonfinite: Nonfinite
    ) -> None:
        self._model = model
        self._channel = channel
        self._trigger = trigger
        self._nonfinite = nonfinite

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return nothing: the channel counts all traffic."""
        return {}

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return nothing: no gradient is encoded."""
        return {}

    def residual_norms(self) -> dict[int, float]:
        """Return nothing: there are no residuals."""
        return {}

    def start_step(self, step: Step) -> None:
        """Do nothing: the owner of the channel sets its step."""

    def finish_step(self) -> StepReport:
        """Check this rank's gradients for non-finite values and vote with the other ranks on skipping the step."""
        started = time.perf_counter()
        if self._trigger == "sync":
            await_command(self._channel.transport)
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        saw_nonfinite = any(zero_nonfinite_(gradient, self._nonfinite) for gradient in gradients)
        skipped = self._nonfinite != "zero" and self._channel.on_any_rank(saw_nonfinite)
        seconds = time.perf_counter() - started
        return StepReport(skipped=skipped, encode_s=0.0, exchange_s=seconds, exposed_s=seconds)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: no state is kept from step to step."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
