"""RMSprop: steps scaled by the root of a running mean of squared gradients.

Source: Tieleman, Hinton, "Lecture 6.5: RMSProp" (Neural networks for machine learning, 2012); `centered` is Graves,
"Generating sequences with recurrent neural networks" (2013).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Lt
from typing_extensions import Doc, override

from bench.optimizers.base import Optimizer
from collectives.options import Positive, PositiveOrZero


@dataclasses.dataclass(kw_only=True)
class Rmsprop(Optimizer):
    """Build torch.optim.RMSprop."""

    default_lr: ClassVar[float] = 0.001

    alpha: Annotated[float, Ge(0), Lt(1), Doc("decay rate of the mean of squared gradients")] = 0.99
    momentum: Annotated[float, Ge(0), Lt(1), Doc("share of the last velocity that is kept")] = 0.0
    centered: Annotated[bool, Doc("divide by the deviation from the mean gradient instead of its size")] = False
    eps: Annotated[Positive, Doc("added to the root before dividing by it")] = 1e-8
    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(
            parameters,
            lr=lr,
            alpha=self.alpha,
            momentum=self.momentum,
            centered=self.centered,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=True,  # torch has no fused version
        )
