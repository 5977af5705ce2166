"""Adam: steps scaled by running moments of the gradient.

Source: Kingma, Ba, "Adam: A Method for Stochastic Optimization" (2015), algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Annotated

import torch
from typing_extensions import Doc, override

from bench.optimizers._moments import MomentOptimizer
from collectives.options import PositiveOrZero


@dataclasses.dataclass(kw_only=True)
class Adam(MomentOptimizer):
    """Build torch.optim.Adam."""

    weight_decay: Annotated[PositiveOrZero, Doc("L2 penalty, added to the gradient")] = 0.0

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.Adam(
            parameters,
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,  # one pass over memory
        )
