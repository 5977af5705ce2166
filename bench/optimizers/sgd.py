"""Stochastic gradient descent with heavy-ball or Nesterov momentum.

Source: Sutskever, Martens, Dahl, Hinton, "On the importance of initialization and momentum in deep learning" (2013).
Differs: as in torch, the learning rate multiplies the velocity instead of entering it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from typing_extensions import Doc

from bench.optimizers.base import HandedOver, Optimizer
from collectives.options import OptionError


@dataclasses.dataclass(kw_only=True)
class Sgd(Optimizer):
    """torch.optim.SGD.

    Raises:
        OptionError: "sgd: nesterov=true needs momentum above 0; leave one of them out".
    """

    default_lr: ClassVar[float] = 0.02

    momentum: Annotated[float, Ge(0), Lt(1), Doc("share of the last velocity that is kept")] = 0.9
    nesterov: Annotated[bool, Doc("look ahead along the velocity before stepping")] = False
    weight_decay: Annotated[float, Ge(0), Doc("L2 penalty, added to the gradient")] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and self.momentum == 0:
            raise OptionError(f"{self.component_name}: nesterov=true needs momentum above 0; leave one of them out")

    def hand_over_momentum(self) -> HandedOver:
        """Plain SGD with the same weight decay is left."""
        left = dataclasses.replace(self, momentum=0.0, nesterov=False)
        return HandedOver(optimizer=left, coefficient=self.momentum, nesterov=self.nesterov)

    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        """One parameter group with these options."""
        return torch.optim.SGD(
            parameters,
            lr=lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            fused=True,  # one pass over memory
        )
