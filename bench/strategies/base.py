"""What a strategy is: when ranks exchange what, and who turns it into the next parameters.

A strategy is one file in this folder with one class. Its dataclass fields are its options; `refusal` says before any
process starts what it cannot be combined with; `bind` is called once on every rank with all that the rank trains with,
and returns the object that the training loop drives. There the strategy decides three things:

- how the model is wrapped (`wrapped`: DistributedDataParallel, the bare network, one of several stages),
- what is exchanged and when (`exchange`: gradients in every backward, parameters every few steps, moments),
- who steps the optimizer (`update`: this rank, a server, an optimizer that exchanges by itself).

One step, as the loop makes it:

    strategy.start_step(step, lr)
    loss_of(strategy.wrapped(x), y).backward()
    outcome = strategy.finish_step()
    num_steps = strategy.update(outcome)

`strategy.synchronize()` comes before every evaluation and `strategy.close()` at the end. Nothing else is known of a
strategy: a new one is a new file.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from bench.core.config import RunConfig
from bench.optimizers.base import Optimizer
from collectives.base import Collective, Key
from collectives.options import Options
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from compressors.base import Compressor
from compressors.ddp.reducer import Reducer
from compressors.ddp.report import StepReport
from compressors.layer import Layer, Step, layers_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """What one rank trains with.

    Attributes:
        config: of the run.
        model: the bare network, on `device`; equal on all ranks.
        compressor, collective, optimizer: with their options.
        device: where this rank computes.
    """

    config: RunConfig
    model: nn.Module
    compressor: Compressor
    collective: Collective
    optimizer: Optimizer
    device: torch.device

    def make_reducer(self) -> tuple[Reducer, Optimizer]:
        """What compresses on this rank, and the optimizer; without its momentum where the reducer applies that."""
        if not self.compressor.owns_momentum:
            return Reducer(self.compressor), self.optimizer
        handed_over = self.optimizer.hand_over_momentum()
        reducer = Reducer(self.compressor, momentum=handed_over.coefficient, nesterov=handed_over.nesterov)
        return reducer, handed_over.optimizer


@dataclasses.dataclass(kw_only=True)
class Strategy(Options, abc.ABC):
    """When ranks exchange what. One file, one class, named after the file; dataclass fields are its options."""

    def default_collectives(self, compressor: Compressor) -> tuple[str, ...]:
        """Where the user names no collective: the first of these that takes what the compressor emits."""
        return compressor.default_collectives

    def default_bucket_mb(self, model_mb: float) -> float | None:
        """Where the user names no bucket size: MiB, for a model whose gradient has so many; None without buckets."""
        return None

    @abc.abstractmethod
    def refusal(self, config: RunConfig, compressor: Compressor, collective: Collective) -> str | None:
        """Why this strategy cannot make this run and what would work, one sentence; None where it can.

        Args:
            config: the run, complete.
            compressor: as the run names it.
            collective: likewise, or the default.
        """

    @abc.abstractmethod
    def bind(self, setup: Setup) -> BoundStrategy:
        """The object that trains; every rank must call."""


class Exchange(Protocol):
    """What moves messages while a step goes on, and what it has sent so far."""

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Bytes and messages sent by this rank since the start, per purpose."""

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """What this rank encoded in its last step, by the ids of the layers in it."""

    def residual_norms(self) -> dict[int, float]:
        """L2 norm of what each layer has not sent yet, by layer id."""

    def finish_step(self) -> StepReport:
        """What was done in this step; call after `backward`. Raises what failed meanwhile."""

    def close(self) -> None:
        """Release threads, wires and memory; every rank must call."""


class BoundStrategy(abc.ABC):
    """A strategy at work on one rank, driven by the training loop.

    Attributes:
        model: the bare network, whose parameters are trained.
        wrapped: what is called with a batch: the model, as the strategy needs it wrapped.
        layers: the model's trainable parameters.
        exchange: what moves messages.
    """

    def __init__(self, model: nn.Module, wrapped: nn.Module, exchange: Exchange) -> None:
        self.model = model
        self.wrapped = wrapped
        self.layers: list[Layer] = layers_of(model)
        self.exchange = exchange

    @abc.abstractmethod
    def start_step(self, step: Step, lr: float) -> None:
        """Call before the forward pass, with the learning rate of this step's update."""

    def finish_step(self) -> StepReport:
        """Call after `backward`: whether a gradient was not finite, and what the exchange did."""
        return self.exchange.finish_step()

    @abc.abstractmethod
    def update(self, outcome: StepReport) -> int:
        """Give the parameters their next values (unless the step is skipped) and clear the gradients.

        Returns:
            Optimizer steps done so far, in which `world_size` batches count as one, whoever of the ranks made them.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until what all ranks did is applied everywhere; ranks then hold equal parameters. Every rank calls."""

    def close(self) -> None:
        """Release threads, wires and memory; every rank must call."""
        self.exchange.close()
