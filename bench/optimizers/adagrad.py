"""Adagrad: steps scaled by the root of the sum of all squared gradients so far.

Source: Duchi, Hazan, Singer, "Adaptive subgradient methods for online learning and stochastic optimization" (2011).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from bench.optimizers.base import Optimizer
from collectives.options import Positive, PositiveOrZero


@dataclasses.dataclass(kw_only=True)
class Adagrad(Optimizer):
    """Build torch.optim.Adagrad."""

    default_lr: ClassVar[float] = 0.01

    lr_decay: Annotated[PositiveOrZero, Doc("the learning rate is divided by 1 + steps * lr_decay")] = 0.0
    eps: Annotated[Positive, Doc("added to the root of the sum before dividing by it")] = 1e-10
    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(
            parameters,
            lr=lr,
            lr_decay=self.lr_decay,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=True,  # torch has a fused version for CPUs only
        )
