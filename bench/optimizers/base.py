"""What an optimizer component is: options and one method that builds the torch optimizer."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch

from collectives.options import OptionError, Options


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
