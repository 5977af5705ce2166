"""The interface of strategies: a strategy decides what ranks exchange, when, and who updates the parameters.

A strategy is one file in this folder, or in a package here, with one class. Its dataclass fields are its options.
`refusals` lists what the strategy does not work with; such runs are refused before any process starts. `bind` is called
once on every rank and returns the object that the training loop drives:

    report = strategy.train_step(batch)     # for every batch
    strategy.synchronize()                  # before every evaluation
    state = strategy.state_dict()           # at every checkpoint, and `load_state_dict` when the run resumes
    strategy.close()                        # at the end

The rest of the code uses nothing else of a strategy, so a new strategy is one new file.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, get_args, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Store
from typing_extensions import override

from bench.core.config.run import RunConfig
from bench.datasets.base import CLASSIFICATION, Task
from bench.optimizers.base import Optimizer
from collectives.base import Collective, Key
from collectives.options import Options
from collectives.payloads.base import Payload
from collectives.refusals import Refusal
from collectives.transport.base import Purpose, Traffic
from compressors.base import Compressor, TorchHook
from compressors.floats import NoCompression
from compressors.layer import Layer, Step, layers_of
from gradwire.exchange.communicator import CompressedCommunicator, own_transport
from gradwire.exchange.reducer import Reducer, reducer_for
from gradwire.exchange.report import StepReport

# Saves a rank's state: (number of optimizer steps done, state). Every rank must call this function.
SaveState = Callable[[int, dict[str, Any]], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that one rank needs for training.

    Attributes:
        config: the run's configuration.
        model: the network, not wrapped in DDP, on `device`; its weights are equal on all ranks.
        compressor, collective, optimizer: the run's components, with their options set.
        device: the device on which this rank computes.
        rendezvous_store: the whole run's rendezvous store, if each rank has its own process group; otherwise None.
    """

    config: RunConfig
    model: nn.Module
    compressor: Compressor
    collective: Collective
    optimizer: Optimizer
    device: torch.device
    rendezvous_store: Store | None = None

    def make_reducer(self) -> tuple[Reducer, Optimizer]:
        """Return a new reducer, which compresses gradients and keeps residuals, and the optimizer to use with it.

        If the compressor applies momentum itself, the reducer gets the optimizer's momentum, and the returned optimizer
        has none.
        """
        if not self.compressor.traits.owns_momentum:
            return reducer_for(self.compressor), self.optimizer
        optimizer, momentum, nesterov = self.optimizer.hand_over_momentum()
        return reducer_for(self.compressor, momentum=momentum, nesterov=nesterov), optimizer

    def open_channel(self) -> CompressedCommunicator:
        """Return a new communicator, with its own process group, for the data that the optimizer exchanges.

        Every rank must call this method.
        """
        compressor = NoCompression() if isinstance(self.compressor, TorchHook) else self.compressor
        return CompressedCommunicator(
            layers_of(self.model),
            reducer_for(compressor),
            self.collective,
            own_transport(self.device, self.config.timeout_s),
        )


@dataclasses.dataclass(kw_only=True)
class Strategy(Options, abc.ABC):
    """Decides what ranks exchange and when. A subclass is named after its file; its dataclass fields are options."""

    @property
    def default_collectives(self) -> tuple[str, ...]:
        """Return names of collectives, best first; an empty result means the compressor's own list.

        If the user names no collective, the run uses the first of these that can send the compressor's payloads.
        """
        return ()

    @property
    def ranks_may_leave(self) -> bool:
        """Return True if ranks other than rank 0 may be lost and start again while the remaining ranks continue.

        Every rank then has its own process group, so that no collective operation of the training loop waits for a lost
        rank. The strategy must do all communication between ranks.
        """
        return False

    def default_bucket_mb(self, layers: Sequence[Layer], optimizer: Optimizer, compressor: Compressor) -> float | None:
        """Return the default size of DDP's buckets in MiB; None if this strategy has no buckets.

        Args:
            layers: the model's trainable parameters.
            optimizer: the run's optimizer.
            compressor: the run's compressor.
        """
        return None

    def complete(self, options: RunConfig) -> RunConfig:
        """Return `options` with the settings of processes that this strategy determines, such as `world_size`.

        This method is called before defaults are chosen.

        Raises:
            UsageError: the user's options contradict these settings.
        """
        return options

    @override
    def obstacle_to_resizing(self) -> str:
        return f"{self.component_name} gives every rank a different task"

    def refusals(
        self, config: RunConfig, compressor: Compressor, collective: Collective, optimizer: Optimizer
    ) -> list[Refusal]:
        """Return what this strategy does not work with, as a table for `collectives.refusals.refuse`.

        Args:
            config: the run's complete configuration.
            compressor: the run's compressor.
            collective: the run's collective, which the user or the default chose.
            optimizer: the run's optimizer.
        """
        return []

    def examine(self, config: RunConfig, model: nn.Module) -> list[str]:
        """Return notes for the user about training this network with this strategy, one sentence each.

        Args:
            config: the run's complete configuration.
            model: the network, on the meta device (without values).

        Raises:
            UsageError: this strategy cannot train the network.
        """
        return []

    @abc.abstractmethod
    def bind(self, setup: Setup) -> BoundStrategy | CommandedRank:
        """Return the object that trains on this rank; every rank must call this method.

        The object is a `CommandedRank` on a rank that only computes for another rank.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The samples of one training step in this process, and the settings of the step.

    Attributes:
        x: what the network gets: [samples, ...].
        y: targets: [samples, ...].
        step: index and epoch of the step, for compressors.
        lr: learning rate of the step's update.
        task: computes the loss.
        num_parts: number of mini-batches into which the batch is split; the gradients of the mini-batches are averaged.
        amp: True to compute forward in bf16 (autocast).
        label_smoothing: share of each target that is spread evenly over all classes, 0 to below 1.
        clip_norm: largest L2 norm of the mean gradient, which the strategy clips before the update; None: no limit.
        stop_at: the next step of the run after which all ranks stop together, to evaluate or to save.
        on_loss: called with the detached mean loss before the gradients are used; raises an error if training has
            diverged.
    """

    x: torch.Tensor
    y: torch.Tensor
    step: Step
    lr: float
    task: Task = CLASSIFICATION
    num_parts: int = 1
    amp: bool = False
    label_smoothing: float = 0.0
    clip_norm: float | None = None
    stop_at: int = 0
    on_loss: Callable[[torch.Tensor], object] = lambda _: None

    def backward(
        self, network: nn.Module, accumulating: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    ) -> None:
        """Run forward and backward: add the gradients of the batch's mean loss to the `grad` of all parameters.

        Args:
            network: the network, wrapped in DDP or not.
            accumulating: returns a context in which backward exchanges no gradients; used for every mini-batch except
                the last.
        """
        *earlier, last = zip(self.x.chunk(self.num_parts), self.y.chunk(self.num_parts), strict=True)
        losses = []
        for x, y in earlier:
            with accumulating():
                loss = self._loss(network, x, y)
                (loss / self.num_parts).backward()
            losses.append(loss.detach())
        loss = self._loss(network, *last)
        self.on_loss(torch.stack([*losses, loss.detach()]).mean() if earlier else loss.detach())
        (loss / self.num_parts if earlier else loss).backward()

    def _loss(self, network: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.amp):
            return self.task.loss(network(x), y, self.label_smoothing)


class Exchange(Protocol):
    """The part of a strategy that sends and receives messages, and counts them.

    `CompressedCommunicator` implements this protocol. The methods that have a body here are right for an exchange that
    encodes nothing and keeps no residuals.
    """

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return the messages and bytes that this rank has sent since the start, per purpose."""

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return the payloads that this rank encoded in its last step, by the ids of the layers in each payload."""
        return {}

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Return the bytes of the tensors that are kept from step to step, by purpose; empty if they are not known."""
        return {}

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of each layer's residual (the part of its gradients not sent yet), by layer id."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank keeps from step to step; call this method between two steps."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""

    def close(self) -> None:
        """Release threads, connections and memory; every rank must call this method."""


@runtime_checkable
class RepeatsDecisions(Protocol):
    """An exchange that makes decisions during training, such as a change of compressor, and can repeat them."""

    def replay(self, decisions: Sequence[Mapping[str, Any]]) -> None:
        """When a run resumes, repeat the decisions of the stopped process; every rank must call this method.

        Args:
            decisions: the decisions from the step reports, each in the form that its `to_dict` returned.
        """


class BoundStrategy(abc.ABC):
    """A strategy on one rank, driven by the training loop.

    Args:
        model: the network whose parameters are trained, not wrapped in DDP.
        exchanges: all objects that send and receive messages; their traffic is added up, and their states are saved
            together.
        optimizer: updates the model's parameters; None if another process updates them.

    Attributes:
        model, exchanges, optimizer: the arguments.
        layers: the model's trainable parameters.
        loop: process group of the ranks that run the training loop; None if all ranks run it.
        interval: number of steps after which the pattern of work repeats, for example the steps between two exchanges.
        first_step: the step of the run from which this process trains; not 0 if the process joins after others.
        evaluates: False if this rank takes no part in evaluations.
    """

    loop: dist.ProcessGroup | None = None
    interval: int = 1
    first_step: int = 0
    evaluates: bool = True

    def __init__(
        self, model: nn.Module, exchanges: Sequence[Exchange], optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        self.model = model
        self.exchanges = exchanges
        self.optimizer = optimizer
        self.layers: list[Layer] = layers_of(model)

    def join(self, *, while_waiting: Callable[[], None], has_joined: Callable[[], None]) -> None:  # noqa: B027 - optional
        """Join the other ranks, if ranks may leave and return, and set `first_step`; the last call before training.

        Args:
            while_waiting: call this at least once a second while this rank waits for ranks that may be lost.
            has_joined: call this once this rank has taken part in an exchange.
        """

    @abc.abstractmethod
    def train_step(self, batch: Batch) -> StepReport:
        """Make one training step (forward, backward, exchange, update) and return its report.

        Every rank must call this method.
        """

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until all updates are applied on all ranks, so that all ranks have equal parameters.

        Every rank must call this method.
        """

    def go_to(self, step: int) -> None:  # noqa: B027 - optional
        """Continue as if `step` steps had been made, to measure times; the state may not be that of a real training.

        Every rank must call this method, between two steps.
        """

    def begin_interval(self) -> None:  # noqa: B027 - optional
        """Continue as if an `interval` had just ended, to measure times; the state may not be that of a real training.

        Every rank must call this method, between two steps.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state that this rank needs to resume bit for bit.

        Every rank must call this method, between two steps.

        The next step may change the returned tensors in place.
        """
        return {
            "model": self.model.state_dict(),
            "exchanges": [exchange.state_dict() for exchange in self.exchanges],
            "optimizer": self.optimizer.state_dict() if self.optimizer is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned in an earlier process of this rank.

        Every rank must call this method.
        """
        self.model.load_state_dict(state["model"])
        for exchange, saved in zip(self.exchanges, state["exchanges"], strict=True):
            exchange.load_state_dict(saved)
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        """Release threads, connections and memory; every rank must call this method.

        All ranks must close at the same time, because a backend that closes while a peer still sends aborts that peer.
        """
        dist.barrier()
        for exchange in self.exchanges:
            exchange.close()
        dist.barrier()

    def columns(self) -> dict[str, Any]:
        """Return the values, by name, of `metrics.csv` columns that only this strategy has; rank 0's are written."""
        return {}

    def replica_figures(self, own: dict[str, Any]) -> list[dict[str, Any]]:
        """Return one dict of figures, by name, for each copy of the network on which this process reports.

        Figures cover the time since the last row. A process reports on several copies if other ranks write no rows
        themselves.

        Args:
            own: figures of this process alone, such as its CPU time, by name.
        """
        return [own]

    def link_rows(self, num_steps: int) -> list[dict[str, Any]]:
        """Return the rows of `links.csv` about the last `num_steps` steps, without the columns run_id, epoch and step.

        Each row gives the traffic between two processes. There are no rows if the strategy does not count this traffic.
        """
        return []

    @property
    def traffic(self) -> Mapping[Purpose, Traffic]:
        """Return the messages and bytes that this rank has sent since the start, per purpose."""
        all_traffic = [exchange.traffic for exchange in self.exchanges]
        return {p: sum((each[p] for each in all_traffic if p in each), Traffic()) for p in get_args(Purpose)}

    @property
    def held_bytes(self) -> int | None:
        """Return the bytes that all exchanges keep from step to step on this rank; None if they are not known."""
        known = [sum(exchange.nbytes.values()) for exchange in self.exchanges if exchange.nbytes]
        return sum(known) if known else None

    @property
    def last_encoded(self) -> Mapping[Key, Payload]:
        """Return the payloads that this rank encoded in its last step, by the ids of the layers in each payload.

        If several exchanges have encoded the same layers, the first exchange's payload is returned.
        """
        return {key: payload for exchange in self.exchanges[::-1] for key, payload in exchange.last_encoded.items()}

    def residual_norms(self) -> dict[int, float]:
        """Return the L2 norm of each layer's residual (the part of its gradients not sent yet), by layer id.

        If several exchanges keep a residual of a layer, the first exchange's norm is returned.
        """
        return {layer: norm for exchange in self.exchanges[::-1] for layer, norm in exchange.residual_norms().items()}


class CommandedRank(abc.ABC):
    """A process that only executes commands; another process runs the training loop and sends the commands."""

    @abc.abstractmethod
    def follow(self, save: SaveState) -> None:
        """Execute commands from the process that runs the training loop, until that process closes its strategy.

        Args:
            save: function that saves this process's state at a checkpoint; called with (number of optimizer steps done,
                state).
        """

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `follow` saved; call this method before `follow`."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release connections and memory; every rank must call this method."""
