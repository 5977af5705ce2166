"""The interface of optimizers: a component has options and one method that builds the torch optimizer.

Most optimizers use gradients that are equal on all ranks. An optimizer that `exchanges` something itself (moments,
factors) gets a `CompressedCommunicator` and sends in its own `step`, which the strategy calls on every rank in every
step that is not skipped. If it also `keeps_gradients`, it uses this rank's own gradient, and the strategy sends no
gradients.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from collectives.base import Collective
from collectives.options import OptionError, Options
from compressors.base import Compressor
from compressors.layer import Layer
from gradwire.exchange.communicator import CompressedCommunicator


@dataclasses.dataclass(kw_only=True)
class Optimizer(Options, abc.ABC):
    """Base of all optimizers. A subclass is named after its file.

    Attributes:
        default_lr: the learning rate if the user gives none.
        watches_layers: True if the optimizer observes the inputs and output gradients of every layer, which requires a
            single forward and backward per step.
        needs_layers: True if the update of a parameter depends on its layer, so that only `bind`, with the whole
            network, builds the optimizer that the user asked for.
        default_collectives: names of collectives, best first, that are tried before the compressor's own.
        clips_own_gradients: True if an optimizer that `keeps_gradients` can have each rank's own gradient clipped.
        steps_alone: True if ranks have different parameters between exchanges; the torch optimizer is a `StepsAlone`.
    """

    default_lr: ClassVar[float]
    watches_layers: ClassVar[bool] = False
    needs_layers: ClassVar[bool] = False
    default_collectives: ClassVar[tuple[str, ...]] = ()
    clips_own_gradients: ClassVar[bool] = False
    steps_alone: ClassVar[bool] = False

    @property
    def exchanges(self) -> bool:
        """Return True if the optimizer itself sends data, and so needs the `channel` of `bind`."""
        return self.keeps_gradients

    @property
    def keeps_gradients(self) -> bool:
        """Return True if ranks exchange other data instead of gradients; each rank then uses its own gradients."""
        return False

    @property
    def period(self) -> int:
        """Return the number of steps after which the work of the steps repeats."""
        return 1

    def warnings(self) -> list[str]:
        """Return what the user should know about these options, one sentence each."""
        return []

    def check_compatible(self, compressor: Compressor, collective: Collective) -> None:
        """Check that this optimizer works with this compressor and this collective.

        Raises:
            Incompatible: the optimizer does not work with them; the message names what would work.
        """

    def check_layers(self, layers: Sequence[Layer]) -> None:
        """Check that this optimizer can train a network with these trainable parameters.

        Raises:
            Incompatible: it cannot; the message names what would work.
        """

    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        """Build the torch optimizer of a model's parameters; every rank must call this method.

        Args:
            model: the network, not wrapped in DDP.
            lr: the learning rate before any schedule.
            channel: carries what the optimizer exchanges; None if the optimizer exchanges nothing.
        """
        return self.build(model.parameters(), lr)

    def hand_over_momentum(self) -> tuple[Optimizer, float, bool]:
        """Return this optimizer without its momentum, for a compressor that applies momentum itself.

        Returns:
            (the remaining optimizer; the momentum coefficient, in [0, 1); True for Nesterov momentum)

        Raises:
            OptionError: "adam has no momentum to hand over to momentum_correction; use sgd".
        """
        raise OptionError(f"{self.component_name} has no momentum to hand over to momentum_correction; use sgd")

    @abc.abstractmethod
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Build the torch optimizer that updates these parameters.

        Args:
            parameters: the parameters to update.
            lr: the learning rate before any schedule.
        """


@runtime_checkable
class StepsAlone(Protocol):
    """A torch optimizer that lets ranks have different parameters between two exchanges."""

    def show_shared(self) -> None:
        """Set the parameters to those after the last exchange, which are equal on all ranks."""

    def show_own(self) -> None:
        """Set the parameters to this rank's own, with its steps since the last exchange."""


@runtime_checkable
class KeepsResiduals(Protocol):
    """A torch optimizer that keeps what its messages leave out."""

    @property
    def residual_nbytes(self) -> int:
        """Return the bytes of what this rank has not sent yet."""


@runtime_checkable
class HasPhases(Protocol):
    """A torch optimizer whose messages depend on the number of steps so far."""

    def go_to(self, step: int) -> None:
        """Go on as if `step` steps were done, to measure times; the state may not be that of a training."""
