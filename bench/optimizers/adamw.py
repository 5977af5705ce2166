"""AdamW: Adam with weight decay that does not enter the moments.

Source: Loshchilov, Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2.
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
class AdamW(MomentOptimizer):
    """Build torch.optim.AdamW."""

    weight_decay: Annotated[PositiveOrZero, Doc("share of the weight removed per step, times lr")] = 0.01

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            parameters,
            lr=lr,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True,  # one pass over memory
        )
