"""What an optimizer component is: options and one method that builds the torch optimizer."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable
from typing import ClassVar

import torch

from collectives.options import Options


@dataclasses.dataclass(kw_only=True)
class Optimizer(Options, abc.ABC):
    """An update rule. One file, one class, named after the file.

    Class facts:
        default_lr: the learning rate where the user gives none.
        momentum_option: name of the option that is a heavy-ball momentum, which a compressor with momentum
            correction may take over (empty: it has none, and momentum correction is refused).
    """

    default_lr: ClassVar[float]
    momentum_option: ClassVar[str] = ""

    @abc.abstractmethod
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """The torch optimizer over these parameters.

        Args:
            parameters: what it updates.
            lr: the learning rate before any schedule.
        """
