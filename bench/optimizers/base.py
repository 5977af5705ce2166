"""What an optimizer component is: options and one method that builds the torch optimizer.

Most optimizers step on gradients that are equal on all ranks. One that `exchanges` something by itself (moments,
factors) is given a `CompressedCommunicator` for it and sends inside its own `step`, which the strategy calls on every
rank in every step that is not skipped. One that `keeps_gradients` also wants this rank's own gradient: the strategy
then sends none.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from collectives.base import Collective
from collectives.options import OptionError, Options
from compressors.base import Compressor
from compressors.ddp.communicator import CompressedCommunicator


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandedOver:
    """What a compressor with momentum correction takes over.

    Attributes:
        optimizer: the optimizer that is left, without momentum.
        coefficient: share of the last velocity that is kept, in [0, 1).
        nesterov: look ahead along the velocity.
    """

    optimizer: Optimizer
    coefficient: float
    nesterov: bool


@dataclasses.dataclass(kw_only=True)
class Optimizer(Options, abc.ABC):
    """An update rule. One file, one class, named after the file.

    Class facts:
        default_lr: the learning rate where the user gives none.
    """

    default_lr: ClassVar[float]

    @property
    def exchanges(self) -> bool:
        """Whether the optimizer sends something by itself in every step, and so needs a channel."""
        return self.keeps_gradients

    @property
    def keeps_gradients(self) -> bool:
        """Whether every rank keeps its own gradient, because the optimizer exchanges something in its place."""
        return False

    @property
    def watches_layers(self) -> bool:
        """Whether the optimizer takes something from every layer in the one forward and backward of a step."""
        return False

    def refusal(self, compressor: Compressor, collective: Collective) -> str | None:
        """Return why this optimizer cannot work with this pair and what would work; None where it can."""
        return None

    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        """The torch optimizer of a model's parameters; every rank must call.

        Args:
            model: the bare network.
            lr: the learning rate before any schedule.
            channel: for what the optimizer exchanges; None where it exchanges nothing.
        """
        return self.build(model.parameters(), lr)

    def hand_over_momentum(self) -> HandedOver:
        """This optimizer without its momentum, for a compressor that applies momentum before selection.

        Raises:
            OptionError: "adam has no momentum to hand over to momentum_correction; use sgd".
        """
        raise OptionError(f"{self.component_name} has no momentum to hand over to momentum_correction; use sgd")

    @abc.abstractmethod
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The torch optimizer over these parameters.

        Args:
            parameters: what it updates.
            lr: the learning rate before any schedule.
        """
