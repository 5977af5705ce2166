"""Replicas: every rank applies the same update to its own copy of the model."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from bench.strategies.base import BoundStrategy, Exchange
from compressors.ddp.report import StepReport
from compressors.layer import Step


def wrap(model: nn.Module, device: torch.device, bucket_mb: float) -> DistributedDataParallel:
    """DDP around the model. Ranks start from one seed, so nothing is broadcast; a hash of the weights is compared."""
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        bucket_cap_mb=bucket_mb,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        init_sync=False,
    )


class GradientExchange(Exchange, Protocol):
    """Replaces the gradients in DDP's buckets by what the ranks' sum stands for."""

    def start_step(self, step: Step) -> None:
        """Tell where training is; call before `backward`."""


class Replicas(BoundStrategy):
    """DDP, its exchange, and an optimizer on every rank.

    Args:
        model: the bare network.
        ddp: DDP around it.
        exchange: what sums its gradients.
        optimizer: over the model's parameters.
    """

    exchange: GradientExchange

    def __init__(
        self,
        model: nn.Module,
        ddp: DistributedDataParallel,
        exchange: GradientExchange,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        super().__init__(model, ddp, exchange)
        self.optimizer = optimizer
        self._num_steps = 0

    @override
    def start_step(self, step: Step, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.exchange.start_step(step)

    @override
    def update(self, outcome: StepReport) -> int:
        if not outcome.skipped:
            self.optimizer.step()
        self.optimizer.zero_grad()  # without old gradients, DDP copies the next ones into its buckets instead of adding
        self._num_steps += 1
        return self._num_steps

    @override
    def synchronize(self) -> None:
        """Replicas are equal after every step."""
