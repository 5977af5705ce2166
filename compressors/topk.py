"""Methods that send the largest entries of a layer: `topk`, `threshold`, `dgc`, `qsparse` and `adaptive_topk`."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.options import Count, Positive, PositiveOrZero
from collectives.payloads import Payload, Sparse, SparseLevels
from compressors.base import PerLayer
from compressors.kernels.residuals import add_and_find, add_and_measure
from compressors.kernels.selection import kth_largest, largest_magnitude, reaching, sum_of_squares, top_k
from compressors.layer import Layer, Step, Tensors, seed_for
from compressors.parts.buckets import split
from compressors.parts.values import (
    TOP_ROUNDOFF,
    Levels,
    ValueDtypeOption,
    ValueForm,
    ValuesOption,
)
from compressors.sparse import MomentumCorrection, Ratio, Sparsifier, WarmupEpochs, WarmupSteps, num_kept


@dataclasses.dataclass(kw_only=True)
class TopK(Sparsifier, name="topk"):
    """Top-k: sends the entries of largest magnitude of every layer.

    Source: Aji, Heafield 2017 (arXiv:1704.05021); error feedback: Stich, Cordonnier, Jaggi 2018 (arXiv:1809.07599).

    A layer of m elements sends k = ratio * m entries, rounded half up, at least 1. Of equal magnitudes, the first are
    sent. Entries that become zero in the type that is sent are left out. values=two_magnitudes sends a value in 2 bits
    instead of 16, with a fifth to a half of the squared error of the published code (values=sigma). With error feedback
    the error stays in the residual. Collectives that cut or add payloads, such as `ring`, send 16 bits per value (32
    for sigma and int8); `allgather` sends the codes.

    Bytes: 16 + min over index codings (k v + indices) per layer, with v bytes per value; at most 16 + m v. Coordinates
    take k i bytes, with i = 1 up to 256 elements, 2 up to 65536, else 4; a bitmap takes m / 8. For codes of b bits:
    24 + ceil(k b / 8) + indices + 4 per 4096 elements, or per 32 values if 4096 elements have fewer (sigma: 16);
    coordinates take ceil(k ceil(log2 m) / 8).
    """

    sends: ClassVar[type[Payload]] = Sparse

    value_dtype: ValueDtypeOption = "fp16"
    ratio: Ratio = 0.01
    warmup_epochs: WarmupEpochs = 4
    warmup_steps: WarmupSteps = 0
    values: ValuesOption = "floats"

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # The k largest of m entries hold at least k / m of |x|^2.
        return self.form.bound_for(num_kept(self.ratio, layer.numel) / layer.numel)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return self.form.nbytes(layer.numel, num_kept(self.ratio, layer.numel))


@dataclasses.dataclass(kw_only=True)
class Threshold(Sparsifier, name="threshold"):
    """Threshold: sends every entry whose magnitude reaches a threshold.

    Source: Strom 2015 (Interspeech), with a residual; Dutta et al. 2020 (arXiv:1911.08250) for the layer-wise use.
    Differs: values are sent as they are, not as plus and minus the threshold; the threshold may be relative to the
    layer.

    The threshold is absolute, or a multiple of the layer's largest magnitude or of its root mean square. With error
    feedback and fp32 values, no residual exceeds an absolute threshold; 16-bit values add their rounding error. With a
    relative threshold, the largest entry is sent at every step.

    Bytes: 16 + min over index codings (z v + indices) per layer of m elements, for z entries of v bytes; at most
    16 + m v.
    """

    sends: ClassVar[type[Payload]] = Sparse

    value_dtype: ValueDtypeOption = "fp16"
    threshold: Annotated[Positive, Doc("smallest magnitude that is sent")] = 0.5
    unit: Annotated[Literal["absolute", "max", "rms"], Doc("unit of the threshold: 1, max|x| or rms(x)")] = "max"

    @override
    def density_for(self, layer: Layer, step: Step) -> None:
        return None

    @override
    def select(self, x: torch.Tensor, layer: Layer, step: Step) -> torch.Tensor:
        if self.unit == "absolute":
            return reaching(x, self.threshold)
        largest = largest_magnitude(x)
        unit = largest if self.unit == "max" else math.sqrt(sum_of_squares(x) / x.numel())
        return reaching(x, self._level(unit, largest))

    @override
    def select_all(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool,
    ) -> tuple[torch.Tensor, list[int]]:
        if residual is None or self.unit == "rms":
            return self.select_each(gradients, residual, left, layers, step, screen=screen)
        selected = []
        for gradient, old, x in zip(gradients, split(residual, layers), split(left, layers), strict=True):
            if self.unit == "absolute":
                selected.append(add_and_find(gradient, old, self.threshold, x)[1])
            else:
                _, largest = add_and_measure(gradient, old, x)
                selected.append(reaching(x, self._level(largest, largest)))
        return torch.cat(selected), [len(each) for each in selected]

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # The largest entry always reaches a relative threshold; it may be that no entry reaches an absolute threshold.
        return self.form.bound_for(0.0 if self.unit == "absolute" else 1 / layer.numel)

    def _level(self, unit: float, largest: float) -> float:
        # at most `largest`, because otherwise nothing of a flat gradient would ever be sent
        return min(self.threshold * unit, largest)


# If fewer than this share of the k entries reach the threshold, the threshold is multiplied by this number.
LOWER_BOUND = 0.8
MAX_ROUNDS = 10
MIN_SAMPLED = 10  # a sample should hold at least this many entries above the threshold


@dataclasses.dataclass(kw_only=True)
class Dgc(Sparsifier, name="dgc"):
    """Deep gradient compression: top-k by a sampled threshold, with momentum correction, clipping and warm-up.

    Source: Lin et al. 2018 (arXiv:1712.01887), sections 3.1 to 3.3; sampling and its corrections as in the authors'
    code (synxlin/deep-gradient-compression, dgc/compression.py).
    Differs: if too many entries reach the threshold, the largest are sent, not the first; clipping is per layer.

    A layer of m elements sends at most k = ratio * m entries: those above a threshold that is estimated from a sample.
    Momentum correction is on by default: the compressor applies the optimizer's momentum, so the optimizer must have a
    single momentum coefficient. Where an entry is sent, its momentum is set to zero (masked).

    Bytes: 16 + min over index codings (z v + indices) per layer, for z <= k entries of v bytes; at most 16 + m v.
    """

    sends: ClassVar[type[Payload]] = Sparse

    value_dtype: ValueDtypeOption = "fp16"
    ratio: Annotated[float, Gt(0), Le(1), Doc("sent entries / all entries, at most")] = 0.001
    warmup_epochs: WarmupEpochs = 4
    warmup_steps: WarmupSteps = 0
    momentum_correction: MomentumCorrection = True
    sample_ratio: Annotated[float, Gt(0), Le(1), Doc("share of a layer that the threshold is estimated from")] = 0.01
    clip_norm: Annotated[
        PositiveOrZero, Doc("clip each layer's own gradient to this L2 norm / sqrt(world_size); 0: no clipping")
    ] = 0.0

    @override
    def select_all(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool,
    ) -> tuple[torch.Tensor, list[int]]:
        samples = any(self.num_kept(layer, step) >= self._fewest_sampled for layer in layers)
        select_all = self.select_each if samples else super().select_all
        return select_all(gradients, residual, left, layers, step, screen=screen)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return self.form.bound_for(1 / layer.numel)  # only the largest entry is sure to be sent

    @property
    def _fewest_sampled(self) -> int:
        # the smallest number of entries to send for which a sample holds at least MIN_SAMPLED of them
        return MIN_SAMPLED * int(1 / self.sample_ratio)

    @override
    def select(self, x: torch.Tensor, layer: Layer, step: Step) -> torch.Tensor:
        """Return the ascending positions of the entries that reach the sampled threshold, but at most the k largest.

        If a sample would hold too few large entries, return the positions of the k largest entries of the whole layer.
        """
        k, stride = self.num_kept(layer, step), int(1 / self.sample_ratio)
        if k == x.numel():
            return torch.arange(k, device=x.device)
        if k < self._fewest_sampled:
            return top_k(x, k)
        sample = x[seed_for(layer, step, per_rank=True) % stride :: stride].contiguous()
        threshold = kth_largest(sample, max(1, math.ceil(sample.numel() * k / x.numel())))
        candidates = reaching(x, threshold)
        for _ in range(MAX_ROUNDS):
            if len(candidates) >= LOWER_BOUND * k:
                break
            threshold *= LOWER_BOUND
            candidates = reaching(x, threshold)
        if len(candidates) > k:
            candidates = candidates[top_k(x.index_select(0, candidates), k)]
        return candidates


@dataclasses.dataclass(kw_only=True)
class QSparse(Sparsifier, name="qsparse"):
    """Quantised top-k: sends the entries of `topk` with four bits per value, in about half the bytes at ratio=0.01.

    Source: Basu et al. 2019 (Qsparse-local-SGD, arXiv:1906.02367): top-k and quantisation composed, with error
    feedback.
    Differs: the magnitudes form a geometric sequence from the smallest entry sent to the largest, and each entry is
    rounded to the nearest of them; every step is sent, not the sum of several steps (strategy `local` does that).

    The rounding error stays in the residual. Sums of such values need more bits: in `ring` they become fp32, so use
    `allgather`, which adds nothing on the way.

    Bytes: 24 + min over index codings (indices) + ceil(k / 2) per layer, for k entries.
    """

    sends: ClassVar[type[Payload]] = SparseLevels

    ratio: Ratio = 0.01
    warmup_epochs: WarmupEpochs = 4
    warmup_steps: WarmupSteps = 0

    @functools.cached_property
    @override
    def form(self) -> ValueForm:
        return Levels()

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # The largest entry arrives unchanged, and the others lose at most their own magnitude.
        return 1 - (1 - TOP_ROUNDOFF**2) / layer.numel

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return self.form.nbytes(layer.numel, num_kept(self.ratio, layer.numel))


FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # possible ratios of a layer, as multiples of the common ratio
COMMON = FACTORS.index(1.0)
BISECTIONS = 40
CURVES = "curves"  # state per layer: squared error at each of these ratios, then the number of elements
MEASURED_AT = "measured_at"  # state per layer: the common density when the layer's errors were measured


@dataclasses.dataclass(kw_only=True)
class AdaptiveTopK(Sparsifier, name="adaptive_topk"):
    """Adaptive top-k: sends the fewest entries whose squared error is at most that of `topk` at the same ratio.

    Source: Markov et al. 2023 (L-GreCo, arXiv:2210.17357): consider all choices of a ratio per layer whose total error
    is at most that of one common ratio, and take the choice with the fewest entries.
    Differs: a Lagrange multiplier over a grid of ratios finds the choice, not dynamic programming. Each rank chooses
    from its own gradients, because sparse payloads contain their indices, so ranks need not agree on a choice.

    Bytes: 16 + min over index codings (k v + indices) per layer of m elements, with v bytes per value and k between
    ratio m / 8 and 8 ratio m; at most 16 + m v.
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
        # every `refresh` steps, and whenever warm-up has changed the density since the last measurement
        measured_at = step.memory.get(MEASURED_AT, layer.id)
        if measured_at is None or step.index % self.refresh == 0:
            return True
        return float(measured_at) != self.density.at(step)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # 1 - k / m for the smallest possible k
        return self.form.bound_for(num_kept(self.ratio * FACTORS[0], layer.numel) / layer.numel)


def choose_factors(curves: Tensors) -> dict[int, float]:
    """Return, by layer id, the factor from `FACTORS` by which each layer's ratio of entries to send is multiplied.

    The factors minimise the number of entries, while the total squared error is at most that of factor 1 for all
    layers. Each layer takes the factor for which entries + multiplier * error is smallest; the multiplier is the
    smallest one that keeps the total error within its limit.

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
    numel = x.numel()
    counts = [num_kept(min(1.0, ratio * factor), numel) for factor in FACTORS]
    most = counts[-1]
    found = (x if most == numel else x[top_k(x, most)]).abs()
    starts = [most - count for count in counts]  # where the largest entries begin, for each ratio
    if found.device.type == "cpu":  # numpy need not sort all entries, and sums them alike on any number of threads
        borders = np.unique(starts)
        parts = np.split(np.partition(found.numpy(), borders[borders > 0]), borders[1:])
        energies = np.array([np.square(part, dtype=np.float64).sum() for part in parts])
        kept = torch.from_numpy(energies[::-1].cumsum()[::-1][np.searchsorted(borders, starts)])
    else:
        squares = found.sort().values.double().square()
        kept = torch.stack([squares[start:].sum() for start in starts])
    total = kept.new_tensor(sum_of_squares(x))
    return torch.cat([(total - kept).clamp(min=0), total.new_tensor([float(numel)])])
