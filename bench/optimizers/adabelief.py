"""AdaBelief: steps scaled by how far gradients lie from their running mean.

Source: Zhuang et al., "AdaBelief optimizer: adapting stepsizes by the belief in observed gradients" (NeurIPS 2020),
algorithm 1, and the published package (adabelief-pytorch 0.2.1) with rectify=False and no weight decay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from typing_extensions import override

from bench.optimizers._belief import Belief, BeliefOptimizer, Rule


@dataclasses.dataclass(kw_only=True)
class AdaBelief(BeliefOptimizer):
    """Build AdaBelief as published: eps is added to the variance in every step, up to eps / (1 - beta2) in all."""

    @override
    def build(self, parameters: Iterable[torch.nn.Parameter], lr: float) -> torch.optim.Optimizer:
        return Belief(parameters, lr, Rule(beta1=self.beta1, beta2=self.beta2, eps=self.eps))
