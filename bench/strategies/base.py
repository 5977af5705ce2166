"""The interface of strategies: a strategy decides what ranks exchange, when, and who updates the parameters.

A strategy is one file in this folder with one class. Its dataclass fields are its options. `check_compatible` refuses,
before any process starts, what the strategy cannot be combined with. `bind` is called once on every rank and returns
the object that the training loop drives. That object decides three things:

- how the model is wrapped (`wrapped`: DistributedDataParallel, the bare network, one of several stages),
- what is exchanged and when (`exchange`: gradients in every backward, parameters every few steps, moments),
- who runs the optimizer (`update`: this rank or a server), and what the optimizer exchanges.

The training loop makes a step like this:

    strategy.start_step(step, lr)
    strategy.backward(strategy.forward(x, y))
    outcome = strategy.finish_step()
    num_steps = strategy.update(outcome)

It calls `strategy.begin()` before the first step, `strategy.synchronize()` before every evaluation, `strategy.drain()`
and `strategy.state_dict()` at every checkpoint, and `strategy.close()` at the end. The rest of the code knows nothing
else about strategies, so a new strategy is one new file.
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
from compressors.base import Compressor, TorchHook
from compressors.ddp.communicator import CompressedCommunicator, own_transport
from compressors.ddp.reducer import Reducer, reducer_for
from compressors.ddp.report import StepReport
from compressors.layer import Layer, Step, layers_of
from compressors.none import NoCompression

# Saves a rank's state: (optimizer steps done, state). Every rank must call.
SaveState = Callable[[int, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that one rank needs for training.

    Attributes:
        config: the run's configuration.
        model: the bare network, on `device`; its weights are equal on all ranks.
        compressor, collective, optimizer: the run's components, with their options set.
        device: the device on which this rank computes.
    """

    config: RunConfig
    model: nn.Module
    compressor: Compressor
    collective: Collective
    optimizer: Optimizer
    device: torch.device

    def make_reducer(self) -> tuple[Reducer, Optimizer]:
        """Return this rank's reducer and optimizer; if the reducer applies momentum, the optimizer has none."""
        if not self.compressor.owns_momentum:
            return reducer_for(self.compressor), self.optimizer
        handed_over = self.optimizer.hand_over_momentum()
        reducer = reducer_for(self.compressor, momentum=handed_over.coefficient, nesterov=handed_over.nesterov)
        return reducer, handed_over.optimizer

    def open_channel(self) -> CompressedCommunicator:
        """Open a channel with its own process group for what the optimizer exchanges; every rank must call."""
        transport = own_transport(self.device, self.config.timeout_s)
        compressor = NoCompression() if isinstance(self.compressor, TorchHook) else self.compressor
        return CompressedCommunicator(layers_of(self.model), reducer_for(compressor), self.collective, transport)


@dataclasses.dataclass(kw_only=True)
class Strategy(Options, abc.ABC):
    """Decide what ranks exchange and when. A subclass is named after its file; its dataclass fields are options."""

    def default_collectives(self, compressor: Compressor) -> tuple[str, ...]:
        """Return default collectives: the first that takes the compressor's payloads is used if the user names none."""
        return compressor.default_collectives

    def default_bucket_mb(self, model_mb: float, optimizer: Optimizer, compressor: Compressor) -> float | None:
        """Return the default bucket size in MiB for a model with `model_mb` MiB of gradients; None: no buckets."""
        return None

    def complete(self, asked: RunConfig) -> RunConfig:
        """Return the configuration with what this strategy decides about processes; called before defaults are chosen.

        Raises:
            UsageError: the user's options contradict it.
        """
        return asked

    @abc.abstractmethod
    def check_compatible(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> None:
        """Check that this strategy can do this run.

        Args:
            config: the run's complete configuration.
            compressor: the run's compressor.
            collective: the run's collective, or the default.
            optimizer: the run's optimizer.

        Raises:
            Incompatible: it cannot; the message names what would work.
        """

    def examine(self, config: RunConfig, model: nn.Module) -> list[str]:
        """Return what the user should know about this network under this strategy, one sentence each.

        Args:
            config: the run's complete configuration.
            model: the network on the meta device, without values.

        Raises:
            UsageError: this strategy cannot train the network.
        """
        return []

    @abc.abstractmethod
    def bind(self, setup: Setup) -> BoundStrategy | Worker:
        """Return the object that trains, or the worker that follows one that trains; every rank must call."""


class Worker(abc.ABC):
    """A process that computes for another process, which runs the training loop."""

    @abc.abstractmethod
    def follow(self, save: SaveState) -> None:
        """Do what the process with the training loop commands, until it says stop.

        Args:
            save: saves this process's state at a checkpoint.
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state that `follow` saved; call before `follow`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release connections and memory; every rank must call."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """Bytes of mini-batches, activations and their gradients that one process sent to another.

    Attributes:
        source, to: names of the two processes.
        nbytes: bytes sent, message headers included.
    """

    source: str
    to: str
    nbytes: int


class Exchange(Protocol):
    """The part of a strategy that sends and receives messages during a step and counts them."""

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Count the bytes and messages that this rank has sent since the start, per purpose."""

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return what this rank encoded in its last step, by the ids of the layers in each payload."""

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of each layer's residual (what it has not sent yet), by layer id."""

    def finish_step(self) -> StepReport:
        """End the step's exchange and report it; call after `backward`. Raises what failed during the step."""

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps from step to step; call between two steps."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def close(self) -> None:
        """Release threads, connections and memory; every rank must call."""


class BoundStrategy(abc.ABC):
    """A strategy on one rank, driven by the training loop.

    Attributes:
        model: the bare network, whose parameters are trained.
        wrapped: the model as the strategy wraps it; called with a batch.
        layers: the model's trainable parameters.
        exchange: sends and receives messages.
        loop: the ranks that run the training loop; None: all ranks.
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
        """Return which of a step's `config.replicas` mini-batches this process loads; they are concatenated."""
        return (dist.get_rank(),)

    def end_pause(self) -> None:  # noqa: B027 - most strategies measure no times of their own
        """Restart own timers; called before the first step and after every pause in training, such as an evaluation."""

    @abc.abstractmethod
    def start_step(self, step: Step, lr: float) -> None:
        """Begin a step with the learning rate of its update; called before the forward pass."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of this process's batch, for `backward`."""
        return nn.functional.cross_entropy(self.wrapped(x), y)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients; their exchange may start during backward."""
        loss.backward()

    def accumulating(self) -> AbstractContextManager[object]:
        """Return a context in which backward adds to this process's gradients without exchanging them."""
        return contextlib.nullcontext()

    def finish_step(self) -> StepReport:
        """End the step's exchange; the report says whether a gradient was not finite. Called after `backward`."""
        return self.exchange.finish_step()

    @abc.abstractmethod
    def update(self, outcome: StepReport) -> int:
        """Update the parameters (unless the step is skipped) and clear the gradients.

        Args:
            outcome: the report of `finish_step`; what the optimizer exchanges is added to it.

        Returns:
            Optimizer steps done so far. `world_size` batches count as one step, whichever ranks processed them.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all updates are applied everywhere: ranks then hold equal parameters. Every rank must call."""

    def state_dict(self) -> dict[str, Any]:
        """Return all that this rank needs to resume bit for bit; call between two steps, on every rank.

        The next step may change the returned tensors in place.
        """
        return {"model": self.model.state_dict(), "exchange": self.exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from what `state_dict` returned in an earlier process of this rank; every rank must call."""
        self.model.load_state_dict(state["model"])
        self.exchange.load_state_dict(state["exchange"])

    def begin(self) -> None:  # noqa: B027 - most strategies have no workers
        """Prepare workers, before this rank resumes or trains."""

    def drain(self) -> None:  # noqa: B027 - most strategies have all ranks wait for each other in every step
        """Wait for ranks that are behind, before a checkpoint; every rank must call."""

    def warm_up(self, step: Step, x: torch.Tensor, y: torch.Tensor) -> None:  # noqa: B027 - most need none
        """Do what only a process's first step does, on any mini-batch; every rank must call.

        `load_state_dict` then replaces everything that this changed.
        """

    def members(self, figures: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return each replica's figures since the last row, given those of the ranks that run the training loop."""
        return figures

    def stop_workers(self) -> None:  # noqa: B027 - most strategies have no workers
        """Stop the workers: no step or evaluation follows."""

    def link_bytes(self) -> list[LinkBytes]:
        """Return the bytes sent between processes since the last call, if one replica's layers lie on several."""
        return []

    def close(self) -> None:
        """Release threads, connections and memory; every rank must call."""
        self.exchange.close()
