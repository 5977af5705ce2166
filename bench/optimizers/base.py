"""The interface of optimizers: a component has options and one method that builds the torch optimizer.

Most optimizers use gradients that are equal on all ranks. An optimizer that `exchanges` something itself (moments,
factors) gets a `CompressedCommunicator` and sends in its own `step`, which the strategy calls on every rank in every
step that is not skipped. If it also `keeps_gradients`, it uses this rank's own gradient, and the strategy sends no
gradients.
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


@dataclasses.dataclass(kw_only=True)
class Optimizer(Options, abc.ABC):
    """Base of all optimizers. A subclass is named after its file.

    Attributes:
        default_lr: the learning rate if the user gives none.
        watches_layers: the optimizer observes every layer, in a single forward and backward per step.
    """

    default_lr: ClassVar[float]
    watches_layers: ClassVar[bool] = False

    @property
    def exchanges(self) -> bool:
        """Return True if the optimizer sends something itself in every step, and so needs a channel."""
        return self.keeps_gradients

    @property
    def keeps_gradients(self) -> bool:
        """Return True if the optimizer exchanges something instead of gradients, so that ranks keep their own."""
        return False

    def check_compatible(self, compressor: Compressor, collective: Collective) -> None:
        """Check that this optimizer works with this pair.

        Raises:
            Incompatible: it does not; the message names what would work.
        """

    def bind(self, model: nn.Module, lr: float, channel: CompressedCommunicator | None = None) -> torch.optim.Optimizer:
        """Build the torch optimizer of a model's parameters; every rank must call.

        Args:
            model: the bare network.
            lr: the learning rate before any schedule.
            channel: carries what the optimizer exchanges; None if it exchanges nothing.
        """
        return self.build(model.parameters(), lr)

    def hand_over_momentum(self) -> tuple[Optimizer, float, bool]:
        """Return this optimizer without its momentum, for a compressor that applies momentum before selection.

        Returns:
            (the remaining optimizer; share of the last velocity that is kept, in [0, 1); whether to look ahead along
            the velocity)

        Raises:
            OptionError: "adam has no momentum to hand over to momentum_correction; use sgd".
        """
        raise OptionError(f"{self.component_name} has no momentum to hand over to momentum_correction; use sgd")

    @abc.abstractmethod
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """Build the torch optimizer of some parameters.

        Args:
            parameters: the parameters to update.
            lr: the learning rate before any schedule.
        """
