"""The interface of optimizers: a component consists of options and a method that builds the torch optimizer.

Most optimizers use gradients that are equal on all ranks. If `exchanges` is True, the optimizer itself also sends data
(moments, factors): it gets a `CompressedCommunicator` and sends in its own `step`, which the strategy calls on every
rank in every step that is not skipped. If `keeps_gradients` is True, too, the optimizer uses this rank's own gradient,
the strategy sends no gradients, and `bind` returns a `gradwire.optim.base.BoundOptimizer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import nn
from typing_extensions import override

from collectives.base import Collective
from collectives.options import OptionError, Options
from collectives.refusals import Refusal
from compressors.base import Compressor
from compressors.layer import Layer
from gradwire.exchange.communicator import CompressedCommunicator
from gradwire.optim.base import FlatOptimizer


@dataclasses.dataclass(kw_only=True)
class Optimizer(Options):
    """Base of all optimizers. A subclass has the name of its file, or the name that its class statement gives.

    Attributes:
        built: class of the torch optimizer; its arguments have the names of the options. Not needed if a subclass
            overrides `bind`.
        default_lr: the learning rate if the user gives none.
        default_collectives: names of collectives, best first, that are tried before the compressor's default
            collectives.
        watches_layers: True if the optimizer observes the inputs and output gradients of every layer, which requires a
            single forward and backward per step.
        needs_network: True if the optimizer needs the whole network and cannot update a part of the parameters alone,
            because the update of a parameter depends on its layer, or ranks have different parameters between
            exchanges.
    """

    built: ClassVar[Callable[..., torch.optim.Optimizer]] = torch.optim.Optimizer
    default_lr: ClassVar[float]
    default_collectives: ClassVar[tuple[str, ...]] = ()
    watches_layers: ClassVar[bool] = False
    needs_network: ClassVar[bool] = False

    @property
    def exchanges(self) -> bool:
        """Return True if the optimizer itself sends data, and so needs the `communicator` of `bind`."""
        return self.keeps_gradients

    @property
    def keeps_gradients(self) -> bool:
        """Return True if ranks exchange other data instead of gradients; each rank then uses its own gradients."""
        return isinstance(self.built, type) and getattr(self.built, "keeps_gradients", False)

    @property
    def encodes_itself(self) -> bool:
        """Return True if the optimizer itself encodes what it sends instead of gradients.

        If so, each rank may clip its own gradients, and K-FAC cannot precondition them.
        """
        return isinstance(self.built, type) and issubclass(self.built, FlatOptimizer)

    @property
    def period(self) -> int:
        """Return the number of steps after which the pattern of work repeats, such as K-FAC's `update_every`."""
        return 1

    @override
    def obstacle_to_resizing(self) -> str:
        return f"{self.component_name} keeps different moments on every rank" if self.keeps_gradients else ""

    def warnings(self) -> list[str]:
        """Return warnings for the user about these options, one sentence each."""
        return []

    def refusals(self, compressor: Compressor, collective: Collective) -> list[Refusal]:
        """Return what this optimizer does not work with, as a table for `collectives.refusals.refuse`."""
        return []

    def check_layers(self, layers: Sequence[Layer]) -> None:
        """Check that this optimizer can train a network with these trainable parameters.

        Raises:
            Incompatible: this optimizer cannot train it; the message names what would work.
        """

    def hand_over_momentum(self) -> tuple[Optimizer, float, bool]:
        """Return this optimizer without its momentum, for a compressor that applies momentum itself.

        Returns:
            (the optimizer without momentum; the momentum coefficient, in [0, 1); True for Nesterov momentum)

        Raises:
            OptionError: "adam has no momentum to hand over to momentum_correction; use sgd, or add ...".
        """
        raise OptionError(
            f"{self.component_name} has no momentum to hand over to momentum_correction; use sgd, or add "
            "momentum_correction=false to the compressor"
        )

    def bind(
        self, model: nn.Module, lr: float, communicator: CompressedCommunicator | None = None
    ) -> torch.optim.Optimizer:
        """Build the torch optimizer for a model's parameters, by default an instance of `built`.

        Every rank must call this method.

        Args:
            model: the network, not wrapped in DDP. Unless the optimizer `needs_network`, this may be a module with only
                a part of the parameters, without their layers.
            lr: the learning rate before any schedule.
            communicator: sends and receives the optimizer's data; None if the optimizer exchanges nothing.
        """
        return self.built(model, lr, communicator=communicator, **self.option_values())
