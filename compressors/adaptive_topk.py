"""Adaptive top-k: chooses the density of every layer so that the whole model sends the fewest entries.

Source: Markov et al. 2023 (L-GreCo, arXiv:2210.17357): among all choices of a ratio per layer whose total error is at
most that of one common ratio, take the one with the fewest entries.
Differs: a Lagrange multiplier over a grid of ratios makes the choice, not dynamic programming. Each rank chooses from
its own gradients: sparse payloads describe themselves, so ranks need not agree.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import torch
from typing_extensions import Doc, override

from collectives.options import Count
from collectives.payloads import Payload
from compressors.kernels.selection import sum_of_squares, top_k
from compressors.layer import Layer, Step, Tensors
from compressors.topk import TopK, num_kept

FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # grid of a layer's ratio, as multiples of the common ratio
COMMON = FACTORS.index(1.0)
BISECTIONS = 40
CURVES = "curves"  # state per layer: squared error at each ratio of the grid, then the number of elements
MEASURED_AT = "measured_at"  # state per layer: the common density at which its curve was measured


@dataclasses.dataclass(kw_only=True)
class AdaptiveTopK(TopK):
    """Adaptive top-k: sends the fewest entries whose squared error is at most that of `topk` at the same ratio.

    Bytes: 16 + min over index codings (k v + indices) per layer, k between ratio m / 8 and 8 ratio m; at most 16 + m v.
    """

    refresh: Annotated[Count, Doc("steps after which the layers' errors are measured again")] = 100

    @override
    def density_for(self, layer: Layer, step: Step) -> float:
        factors = step.memory.derived("factors", lambda: _factors_of(step.memory.by_layer(CURVES)))
        return min(1.0, self.density(step) * factors.get(layer.id, 1.0))  # 1 until the layer's errors are measured

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if self._measures(layer, step):
            density = self.density(step)
            step.memory.propose(CURVES, layer.id, _error_curve(x, density).cpu())
            step.memory.propose(MEASURED_AT, layer.id, torch.tensor(density, dtype=torch.float64))
        return super().encode(x, layer, step)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        if self._measures(layer, step):
            return None
        return super().encode_sum(gradients, residual, left, layer, step)

    def _measures(self, layer: Layer, step: Step) -> bool:
        # every `refresh` steps, and if warm-up has changed the density since the last measurement
        measured_at = step.memory.get(MEASURED_AT, layer.id)
        return measured_at is None or float(measured_at) != self.density(step) or step.index % self.refresh == 0

    @override
    def expected_nbytes(self, layer: Layer) -> None:
        return None

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # 1 - k / m for the smallest k of the grid
        return self._bound_for(num_kept(self.ratio * FACTORS[0], layer.numel) / layer.numel)


def _factors_of(curves: Tensors) -> dict[int, float]:
    return dict(zip(curves, choose_factors(torch.stack(list(curves.values()))), strict=True)) if curves else {}


def choose_factors(curves: torch.Tensor) -> list[float]:
    """Return one factor of the grid per layer.

    The factors minimise the number of entries, with a total squared error of at most that of factor 1 for all layers:
    each layer takes the factor with the smallest entries + multiplier * error, for the smallest multiplier that keeps
    the error.

    Args:
        curves: fp64 [num_layers, len(FACTORS) + 1], squared error at each factor, then the layer's number of elements.
    """
    errors = curves[:, :-1]
    entries = curves[:, -1:] * torch.tensor(FACTORS, dtype=curves.dtype)
    allowed = float(errors[:, COMMON].sum())
    rows = torch.arange(len(curves))

    def chosen(multiplier: float) -> torch.Tensor:
        return (entries + multiplier * errors).argmin(1)

    low, high = 0.0, 1.0
    while float(errors[rows, chosen(high)].sum()) > allowed and high < 1e30:
        high *= 16
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if float(errors[rows, chosen(middle)].sum()) > allowed:
            low = middle
        else:
            high = middle
    picked = chosen(high)
    if float(entries[rows, picked].sum()) > float(entries[:, COMMON].sum()):
        return [1.0] * len(curves)
    return [FACTORS[index] for index in picked.tolist()]


def _error_curve(x: torch.Tensor, ratio: float) -> torch.Tensor:
    # the squared error of top-k at each ratio, then the number of elements: fp64 [len(FACTORS) + 1]
    counts = [num_kept(min(1.0, ratio * factor), x.numel()) for factor in FACTORS]
    largest = x[top_k(x, counts[-1])].double().square().sort(descending=True).values
    total = largest.new_tensor(sum_of_squares(x))
    lost = (total - largest.cumsum(0)[torch.tensor(counts) - 1]).clamp(min=0)
    return torch.cat([lost, total.new_tensor([float(x.numel())])])
