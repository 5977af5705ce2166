"""The preconditioner: it replaces the gradients of a model's layers by G^-1 gradient A^-1, before the optimizer steps.

Source: kfac-pytorch (kfac/layers/base.py, inverse.py and base_preconditioner.py; Pauloski et al. 2021): running
averages start at the identity, both factors have the same damping, and a step whose predicted change of the model's
output (lr^2 times the sum of gradient times preconditioned gradient) exceeds `kl_clip` is shortened to it.
Differs: it solves with Cholesky factors instead of multiplying with inverses.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from bench.optimizers.kronecker.exchange import MomentExchange
from bench.optimizers.kronecker.layer import MomentCapture


class Preconditioner:
    """Keep the running averages of a model's factors, and precondition its gradients in place.

    Args:
        capture: computes the moments of the model's layers.
        exchange: averages and factors the moments over ranks.
        update_every: steps between two updates of the factors.
        damping: added to the diagonal of both factors.
        decay: share of the running averages that an update keeps.
        kl_clip: bound of a step's predicted change; None: no bound.
        own_gradients: True if gradients differ between ranks; the mean of the ranks' changes is then bounded.
    """

    def __init__(
        self,
        capture: MomentCapture,
        exchange: MomentExchange,
        *,
        update_every: int,
        damping: float,
        decay: float,
        kl_clip: float | None,
        own_gradients: bool = False,
    ) -> None:
        self._capture = capture
        self._exchange = exchange
        self._update_every = update_every
        self._damping = damping
        self._decay = decay
        self._kl_clip = kl_clip
        self._own_gradients = own_gradients
        self._averages = [
            torch.eye(size, device=layer.module.weight.device) for layer in capture.layers for size in layer.sizes
        ]
        self._factors: list[torch.Tensor] = []
        self._steps = 0
        capture.wanted = True

    @torch.no_grad()
    def precondition_(self, lr: float) -> None:
        """Replace the gradients by preconditioned ones; every rank must call, but not in skipped steps.

        Args:
            lr: learning rate of the optimizer's next step.
        """
        if self._capture.wanted and self._averages:
            self._update()
        self._steps += 1
        self._capture.wanted = self._steps % self._update_every == 0
        if not self._factors:
            return
        layers = self._capture.layers
        gradients = [layer.gradient for layer in layers]
        changed = [
            preconditioned(gradient, *self._factors[2 * index : 2 * index + 2])
            for index, gradient in enumerate(gradients)
        ]
        scale = 1.0 if self._kl_clip is None else self._scale(gradients, changed, lr, self._kl_clip)
        for layer, matrix in zip(layers, changed, strict=True):
            layer.replace_gradient(matrix * scale)

    def state_dict(self) -> dict[str, Any]:
        """Return the running averages, their factors and the number of steps, which are equal on all ranks."""
        return {"averages": self._averages, "factors": self._factors, "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned, by copying it."""
        for average, saved in zip(self._averages, state["averages"], strict=True):
            average.copy_(saved)
        self._factors = [factor.clone() for factor in state["factors"]]
        self._steps = state["steps"]
        self._capture.wanted = self._steps % self._update_every == 0

    def _scale(self, gradients: list[torch.Tensor], changed: list[torch.Tensor], lr: float, bound: float) -> float:
        change = predicted_change(gradients, changed, lr)
        return kl_scale(self._exchange.mean_scalar(change) if self._own_gradients else change, bound)

    def _update(self) -> None:
        """Update the averages with this step's moments and factor them again, unless a moment is not finite."""
        means = self._exchange.mean(self._capture.moments())
        if means is None:
            return
        for average, mean in zip(self._averages, means, strict=True):
            average.mul_(self._decay).add_(mean, alpha=1 - self._decay)
        self._factors = self._exchange.factors(self._averages, self._damping)


def preconditioned(gradient: torch.Tensor, of_inputs: torch.Tensor, of_outputs: torch.Tensor) -> torch.Tensor:
    """Return G^-1 gradient A^-1 for a gradient [out, in].

    Args:
        gradient: a layer's gradient.
        of_inputs: L [in, in] with L L^T = A.
        of_outputs: L [out, out] with L L^T = G.
    """
    half = torch.cholesky_solve(gradient, of_outputs)
    return torch.cholesky_solve(half.T, of_inputs).T


def predicted_change(gradients: list[torch.Tensor], changed: list[torch.Tensor], lr: float) -> float:
    """Return lr^2 sum(gradient * preconditioned gradient), at least 0."""
    products = [(gradient * matrix).sum() for gradient, matrix in zip(gradients, changed, strict=True)]
    return lr**2 * abs(float(torch.stack(products).sum()))


def kl_scale(change: float, bound: float) -> float:
    """Return the factor, at most 1, for preconditioned gradients that keeps their predicted change within the bound."""
    return min(1.0, math.sqrt(bound / change)) if change else 1.0
