"""What a strategy is: when ranks exchange what, and who turns it into the next parameters.

A strategy is one file in this folder with one class. Its dataclass fields are its options; `refusal` says before any
process starts what it cannot be combined with; `bind` is called once on every rank with all that the rank trains with,
and returns the object that the training loop drives. There the strategy decides three things:

- how the model is wrapped (`wrapped`: DistributedDataParallel, the bare network, one of several stages),
- what is exchanged and when (`exchange`: gradients in every backward, parameters every few steps, moments),
- who steps the optimizer (`update`: this rank, a server), and what it exchanges by itself meanwhile.

One step, as the loop makes it:

    strategy.start_step(step, lr)
    strategy.backward(strategy.forward(x, y))
    outcome = strategy.finish_step()
    num_steps = strategy.update(outcome)

`strategy.begin()` comes before the first, `strategy.synchronize()` before every evaluation, `strategy.drain()` and
`strategy.state_dict()` at every checkpoint, and `strategy.close()` at the end. Nothing else is known of a strategy: a
new one is a new file.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from bench.core.config.run import RunConfig
from bench.optimizers.base import Optimizer
from collectives.base import Collective, Key
from collectives.options import Options
from collectives.payloads.base import Payload
from collectives.transport.base import Purpose, Traffic
from compressors.base import Compressor
from compressors.ddp.communicator import CompressedCommunicator, own_transport
from compressors.ddp.reducer import Reducer
from compressors.ddp.report import StepReport
from compressors.layer import Layer, Step, layers_of

SaveState = Callable[[int, dict[str, Any]], None]
"""(optimizer steps done, this rank's state): keeps it; every rank must call"""


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

    def open_channel(self) -> CompressedCommunicator:
        """The run's pair over a process group of its own, for what the optimizer exchanges; every rank must call."""
        transport = own_transport(self.device, self.config.timeout_s)
        return CompressedCommunicator(layers_of(self.model), Reducer(self.compressor), self.collective, transport)


@dataclasses.dataclass(kw_only=True)
class Strategy(Options, abc.ABC):
    """When ranks exchange what. One file, one class, named after the file; dataclass fields are its options."""

    def default_collectives(self, compressor: Compressor) -> tuple[str, ...]:
        """Where the user names no collective: the first of these that takes what the compressor emits."""
        return compressor.default_collectives

    def default_bucket_mb(self, model_mb: float, optimizer: Optimizer, compressor: Compressor) -> float | None:
        """Where the user names no bucket size: MiB, for a model whose gradient has so many; None without buckets."""
        return None

    def complete(self, asked: RunConfig) -> RunConfig:
        """The run with what this strategy decides about its processes; called before anything is chosen.

        Raises:
            UsageError: what was asked for contradicts that.
        """
        return asked

    @abc.abstractmethod
    def refusal(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> str | None:
        """Why this strategy cannot make this run and what would work, one sentence; None where it can.

        Args:
            config: the run, complete.
            compressor: as the run names it.
            collective: likewise, or the default.
            optimizer: as the run names it.
        """

    def examine(self, config: RunConfig, model: nn.Module) -> list[str]:
        """What the user should know about this network under this strategy, one sentence each.

        Args:
            config: the run, complete.
            model: on the meta device, without values.

        Raises:
            UsageError: this strategy cannot train it.
        """
        return []

    @abc.abstractmethod
    def bind(self, setup: Setup) -> BoundStrategy | Worker:
        """The object that trains, or that follows one that does; every rank must call."""


class Worker(abc.ABC):
    """A process that computes for one that runs the training loop."""

    @abc.abstractmethod
    def follow(self, save: SaveState) -> None:
        """Do what the other one says, until it says that all is done.

        Args:
            save: keeps this process's state when the other one makes a checkpoint.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `follow` saved; call before it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release wires and memory; every rank must call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """What one process sent to another of mini-batches, activations and their gradients.

    Attributes:
        source, to: names of both.
        nbytes: headers included.
    """

    source: str
    to: str
    nbytes: int


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

    def state_dict(self) -> dict[str, Any]:
        """What this rank keeps from step to step, between two steps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""

    def close(self) -> None:
        """Release threads, wires and memory; every rank must call."""


class BoundStrategy(abc.ABC):
    """A strategy at work on one rank, driven by the training loop.

    Attributes:
        model: the bare network, whose parameters are trained.
        wrapped: what is called with a batch: the model, as the strategy needs it wrapped.
        layers: the model's trainable parameters.
        exchange: what moves messages.
        loop: the ranks that run the training loop; None: all.
    """

    def __init__(
        self, model: nn.Module, wrapped: nn.Module, exchange: Exchange, loop: dist.ProcessGroup | None = None
    ) -> None:
        self.model = model
        self.wrapped = wrapped
        self.layers: list[Layer] = layers_of(model)
        self.exchange = exchange
        self.loop = loop

    @property
    def shard_ids(self) -> Sequence[int]:
        """Which of a step's `config.replicas` mini-batches this process loads, laid end to end."""
        return (dist.get_rank(),)

    def end_pause(self) -> None:  # noqa: B027 - most time nothing by themselves
        """Call before the first step and after whatever went on between two that is no part of training."""

    @abc.abstractmethod
    def start_step(self, step: Step, lr: float) -> None:
        """Call before the forward pass, with the learning rate of this step's update."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of what this process loaded, for `backward`."""
        return nn.functional.cross_entropy(self.wrapped(x), y)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients; what they are exchanged with may start meanwhile."""
        loss.backward()

    def accumulating(self) -> AbstractContextManager[object]:
        """Keep the gradients of a forward and backward inside to this process, to be added to by the next ones."""
        return contextlib.nullcontext()

    def finish_step(self) -> StepReport:
        """Call after `backward`: whether a gradient was not finite, and what the exchange did."""
        return self.exchange.finish_step()

    @abc.abstractmethod
    def update(self, outcome: StepReport) -> int:
        """Give the parameters their next values (unless the step is skipped) and clear the gradients.

        Args:
            outcome: of `finish_step`; what the optimizer exchanges by itself is added to it.

        Returns:
            Optimizer steps done so far, in which `world_size` batches count as one, whoever of the ranks made them.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until what all ranks did is applied everywhere; ranks then hold equal parameters. Every rank calls."""

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on bit for bit, between two steps; every rank must call.

        What it holds may change with the next step.
        """
        return {"model": self.model.state_dict(), "exchange": self.exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave in another process of this rank; every rank must call."""
        self.model.load_state_dict(state["model"])
        self.exchange.load_state_dict(state["exchange"])

    def begin(self) -> None:  # noqa: B027 - most have nothing to do
        """Do what followers wait for, before this rank resumes or trains."""

    def drain(self) -> None:  # noqa: B027 - ranks that wait in every step are level
        """Wait for ranks that are behind, where they go at their own speed, before a checkpoint; every rank calls."""

    def warm_up(self, step: Step, x: torch.Tensor, y: torch.Tensor) -> None:  # noqa: B027 - most are ready at once
        """Do what a new process does in its first step alone; `load_state_dict` then replaces all that it changed.

        Every rank must call, with any mini-batch.
        """

    def members(self, figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What each of those who exchange did since the last row, from what the loop's ranks did: the same, mostly."""
        return figures

    def stop_workers(self) -> None:  # noqa: B027 - most have no followers
        """Let followers end: no step and no evaluation comes any more."""

    def link_bytes(self) -> list[LinkBytes]:
        """What went from process to process since the last call, where layers lie on several."""
        return []

    def close(self) -> None:
        """Release threads, wires and memory; every rank must call."""
        self.exchange.close()
