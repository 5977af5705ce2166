"""Steps by the sign of the momentum, with decoupled weight decay.

Source: Chen et al. 2023 (Lion, arXiv:2302.06675), algorithm 2.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from typing_extensions import Doc

from bench.optimizers.base import Optimizer
from gradwire.exchange.communicator import CompressedCommunicator


@dataclasses.dataclass(kw_only=True)
class SignMomentum(Optimizer):
    """In each step, every weight moves by the learning rate."""

    default_lr = 1e-3

    beta1: Annotated[float, Ge(0), Lt(1), Doc("share of the momentum in the step")] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), Doc("share of the momentum that is kept")] = 0.99

    def bind(
        self, model: torch.nn.Module, lr: float, communicator: CompressedCommunicator | None = None
    ) -> torch.optim.Optimizer:
        """Return the optimizer over this model's parameters."""
        return _Lion(model.parameters(), {"lr": lr, "beta1": self.beta1, "beta2": self.beta2})


class _Lion(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                weight.sub_(momentum.lerp(weight.grad, 1 - group["beta1"]).sign_(), alpha=group["lr"])
                momentum.lerp_(weight.grad, 1 - group["beta2"])
