"""Adaptive top-k: sends the fewest entries whose squared error is at most that of `topk` at the same ratio."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.options import Count
from collectives.payloads import Payload, Sparse
from compressors.base import PerLayer
from compressors.kernels.selection import sum_of_squares, top_k
from compressors.layer import Layer, Step, Tensors
from compressors.parts.values import ValueDtypeOption, ValuesOption
from compressors.sparse import Ratio, Sparsifier, WarmupEpochs, WarmupSteps, num_kept

FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # grid of a layer's ratio, as multiples of the common ratio
COMMON = FACTORS.index(1.0)
BISECTIONS = 40
CURVES = "curves"  # state per layer: squared error at each ratio of the grid, then the number of elements
MEASURED_AT = "measured_at"  # state per layer: the common density at which its curve was measured


@dataclasses.dataclass(kw_only=True)
class AdaptiveTopK(Sparsifier):
    """Adaptive top-k: sends the fewest entries whose squared error is at most that of `topk` at the same ratio.

    Source: Markov et al. 2023 (L-GreCo, arXiv:2210.17357): among all choices of a ratio per layer whose total error is
    at most that of one common ratio, take the one with the fewest entries.
    Differs: a Lagrange multiplier over a grid of ratios makes the choice, not dynamic programming. Each rank chooses
    from its own gradients: sparse payloads describe themselves, so ranks need not agree.

    Bytes: 16 + min over index codings (k v + indices) per layer, k between ratio m / 8 and 8 ratio m; at most 16 + m v.
    """

    sends: ClassVar[type[Payload]] = Sparse

    value_dtype: ValueDtypeOption = "fp16"
    ratio: Ratio = 0.01
    warmup_epochs: WarmupEpochs = 4
    warmup_steps: WarmupSteps = 0
    values: ValuesOption = "floats"
    refresh: Annotated[Count, Doc("steps after which the layers' errors are measured again")] = 100

    @override
    def density_for(self, layer: Layer, step: Step) -> float:
        factors = step.memory.derived("factors", lambda: choose_factors(step.memory.by_layer(CURVES)))
        # the factor is 1 until the layer's errors are measured
        return min(1.0, self.density.at(step) * factors.get(layer.id, 1.0))

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if self._measures(layer, step):
            density = self.density.at(step)
            step.memory.propose(CURVES, layer.id, _error_curve(x, density).cpu())
            step.memory.propose(MEASURED_AT, layer.id, torch.tensor(density, dtype=torch.float64))
        return super().encode(x, layer, step)

    @override
    def encode_bucket(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor | None,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool = False,
    ) -> Payload:
        encode = super().encode_bucket
        if any(self._measures(layer, step) for layer in layers):
            encode = functools.partial(PerLayer.encode_bucket, self)
        return encode(gradients, residual, left, layers, step, screen=screen)

    def _measures(self, layer: Layer, step: Step) -> bool:
        # every `refresh` steps, and if warm-up has changed the density since the last measurement
        measured_at = step.memory.get(MEASURED_AT, layer.id)
        if measured_at is None or step.index % self.refresh == 0:
            return True
        return float(measured_at) != self.density.at(step)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # 1 - k / m for the smallest k of the grid
        return self.form.bound_for(num_kept(self.ratio * FACTORS[0], layer.numel) / layer.numel)


def choose_factors(curves: Tensors) -> dict[int, float]:
    """Return, by layer id, the factor from `FACTORS` by which each layer's ratio of entries to send is multiplied.

    The factors minimise the number of entries, with a total squared error of at most that of factor 1 for all layers:
    each layer takes the factor with the smallest entries + multiplier * error, for the smallest multiplier that keeps
    the error.

    Args:
        curves: fp64 [len(FACTORS) + 1] by layer id: squared error at each factor, then the layer's number of elements.
    """
    if not curves:
        return {}
    table = torch.stack(list(curves.values()))
    errors = table[:, :-1]
    entries = table[:, -1:] * torch.tensor(FACTORS, dtype=table.dtype)
    allowed = float(errors[:, COMMON].sum())
    rows = torch.arange(len(table))

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
        return dict.fromkeys(curves, 1.0)
    return {layer_id: FACTORS[index] for layer_id, index in zip(curves, picked.tolist(), strict=True)}


def _error_curve(x: torch.Tensor, ratio: float) -> torch.Tensor:
    # the squared error of top-k at each ratio, then the number of elements: fp64 [len(FACTORS) + 1]
    counts = [num_kept(min(1.0, ratio * factor), x.numel()) for factor in FACTORS]
    largest = x[top_k(x, counts[-1])].double().square().sort(descending=True).values
    total = largest.new_tensor(sum_of_squares(x))
    lost = (total - largest.cumsum(0)[torch.tensor(counts) - 1]).clamp(min=0)
    return torch.cat([lost, total.new_tensor([float(x.numel())])])
