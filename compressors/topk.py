"""Methods that send the largest entries of a layer: `topk`, `threshold`, `dgc`, `qsparse` and `adaptive_topk`."""

import ctypes
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.options import Count, CountOrZero, Positive, PositiveOrZero
from collectives.payloads import Payload, Sparse, SparseLevels
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.sparse import LARGEST, NUM_LEVELS
from compressors.base import NonFiniteSum, Sparsifier, Traits, finds_nonfinite
from compressors.kernels.quantisation import pack_nearest_levels
from compressors.kernels.residuals import add_and_find, add_and_measure, add_and_top_k, send_top_k
from compressors.kernels.selection import (
    kth_largest,
    largest_magnitude,
    magnitude_range,
    reaching,
    sum_of_squares,
    top_k,
)
from compressors.layer import Layer, Step, Tensors, seed_for

ValueDtype = Literal["fp16", "bf16", "fp32"]

TORCH_DTYPES: dict[ValueDtype, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


def roundoff(dtype: ValueDtype) -> float:
    """Return the largest relative rounding error of fp32 values within the type's normal range."""
    return 0.0 if dtype == "fp32" else torch.finfo(TORCH_DTYPES[dtype]).eps / 2


@dataclasses.dataclass(kw_only=True)
class TypedSparsifier(Sparsifier):
    """Base of the methods that send some entries, with an option for the type in which their values are sent."""

    value_dtype: Annotated[ValueDtype, Doc("type of the values on the wire")] = "fp16"

    @override
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> Sparse:
        values = to_value_dtype(values, TORCH_DTYPES[self.value_dtype], step.world_size)
        if not values.all():
            indices, values = indices[values != 0], values[values != 0]
        return Sparse(numel, indices, values)

    def _bound_for(self, share: float) -> float:
        """Return a bound on |x - C(x)|^2 / |x|^2 if the entries sent hold at least this share of |x|^2."""
        return 1 - share * (1 - roundoff(self.value_dtype) ** 2)


@dataclasses.dataclass(kw_only=True)
class ShareSparsifier(Sparsifier):
    """Base of the methods that send a share of the entries, with options for that share and for its warm-up.

    By default, the entries of largest magnitude are sent.
    """

    ratio: Annotated[float, Gt(0), Le(1), Doc("kept entries / entries")] = 0.01
    warmup_epochs: Annotated[CountOrZero, Doc("epochs in which the density falls as 0.25^(epoch+1) down to ratio")] = 4

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        denser = sum(0.25 ** (epoch + 1) > self.ratio for epoch in range(self.warmup_epochs))
        return dataclasses.replace(super().traits, denser_epochs=denser)

    @override
    def density_for(self, layer: Layer, step: Step) -> float:
        if step.warmup and step.epoch < self.warmup_epochs:
            return max(self.ratio, 0.25 ** (step.epoch + 1))
        return self.ratio

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self._sparse(x, top_k(x, num_kept(self.density_for(layer, step), x.numel())), step)


@dataclasses.dataclass(kw_only=True)
class DensitySparsifier(ShareSparsifier, TypedSparsifier):
    """Base of the methods that send a share of the entries, with options for the share, warm-up and value type."""


def num_kept(density: float, numel: int) -> int:
    """Return density * numel, rounded half up, between 1 and numel; 0 if numel is 0."""
    return min(numel, max(1, int(density * numel + 0.5)))


@dataclasses.dataclass(kw_only=True)
class TopK(DensitySparsifier, name="topk"):
    """Top-k: sends the entries of largest magnitude of every layer.

    Source: Aji, Heafield 2017 (arXiv:1704.05021); error feedback: Stich, Cordonnier, Jaggi 2018 (arXiv:1809.07599).

    A layer of m elements sends k = ratio * m entries, rounded half up, at least 1. Of equal magnitudes the first is
    sent. Entries that are zero on the wire are left out.

    Bytes: 16 + min over index codings (k v + indices) per layer, with v bytes per value; at most 16 + m v. Coordinates
    take k i bytes, with i = 1 up to 256 elements, 2 up to 65536, else 4; a bitmap takes m / 8.
    """

    sends: ClassVar[type[Payload]] = Sparse

    @override
    @finds_nonfinite
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        k, dtype = num_kept(self.density_for(layer, step), layer.numel), TORCH_DTYPES[self.value_dtype]
        positions, values, is_finite = send_top_k(gradients[0], residual, left, k, dtype, step.world_size)
        if not is_finite:
            raise NonFiniteSum
        return Sparse(layer.numel, positions, values)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # The k largest of m entries hold at least k / m of |x|^2.
        return self._bound_for(num_kept(self.ratio, layer.numel) / layer.numel)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        return Sparse.packed_nbytes(layer.numel, num_kept(self.ratio, layer.numel), TORCH_DTYPES[self.value_dtype])


@dataclasses.dataclass(kw_only=True)
class Threshold(TypedSparsifier, name="threshold"):
    """Threshold: sends every entry whose magnitude reaches a threshold.

    Source: Strom 2015 (Interspeech), with a residual; Dutta et al. 2020 (arXiv:1911.08250) for the layer-wise use.
    Differs: values are sent as they are, not as plus and minus the threshold; the threshold may be relative to the
    layer.

    The threshold is absolute, or a multiple of the layer's largest or root mean square magnitude. With error feedback
    and fp32 values, no residual exceeds an absolute threshold; 16-bit values add their rounding error. With a relative
    threshold, the largest entry is sent at every step.

    Bytes: 16 + min over index codings (z v + indices) per layer, for z entries of v bytes; at most 16 + m v.
    """

    sends: ClassVar[type[Payload]] = Sparse

    threshold: Annotated[Positive, Doc("smallest magnitude that is sent")] = 0.5
    unit: Annotated[Literal["absolute", "max", "rms"], Doc("unit of the threshold: 1, max|x| or rms(x)")] = "max"

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if self.unit == "absolute":
            return self._sparse(x, reaching(x, self.threshold), step)
        largest = largest_magnitude(x)
        level = self._level(largest if self.unit == "max" else math.sqrt(sum_of_squares(x) / x.numel()), largest)
        return self._sparse(x, reaching(x, level), step)

    @override
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload | None:
        if self.unit == "rms":
            return None
        if self.unit == "max":
            _, largest = add_and_measure(gradients[0], residual, left)
            payload = self._sparse(left, reaching(left, self._level(largest, largest)), step)
        else:
            _, positions, values = add_and_find(gradients[0], residual, self.threshold, left)
            payload = self._sparse_values(layer.numel, positions, values, step)
        payload.subtract_from_(left)
        return payload

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # The largest entry always reaches a relative threshold; perhaps none reaches an absolute one.
        return self._bound_for(0.0 if self.unit == "absolute" else 1 / layer.numel)

    def _level(self, unit: float, largest: float) -> float:
        # at most `largest`: otherwise a flat gradient would never be sent
        return min(self.threshold * unit, largest)


# If fewer than this share of the k entries reach the threshold, the threshold is multiplied by the same number.
LOWER_BOUND = 0.8
MAX_ROUNDS = 10
MIN_SAMPLED = 10  # a sample should hold at least this many entries above the threshold


@dataclasses.dataclass(kw_only=True)
class Dgc(DensitySparsifier, name="dgc"):
    """Deep gradient compression: top-k by a sampled threshold, with momentum correction, clipping and warm-up.

    Source: Lin et al. 2018 (arXiv:1712.01887), sections 3.1 to 3.3; sampling and its corrections as in the authors'
    code (synxlin/deep-gradient-compression, dgc/compression.py).
    Differs: if too many entries reach the threshold, the largest are sent, not the first; clipping is per layer.

    A layer of m elements sends at most k = ratio * m entries: those above a threshold estimated from a sample. Momentum
    correction is on by default: the compressor applies the optimizer's momentum, so the optimizer must have a single
    momentum coefficient. Momentum is cleared (masked) where an entry is sent.

    Bytes: 16 + min over index codings (z v + indices) per layer, for z <= k entries of v bytes; at most 16 + m v.
    """

    sends: ClassVar[type[Payload]] = Sparse

    ratio: Annotated[float, Gt(0), Le(1), Doc("kept entries / entries, at most")] = 0.001
    momentum_correction: Annotated[
        bool,
        Doc("apply the optimizer's momentum before selection, cleared where sent (the optimizer's own is then off)"),
    ] = True
    sample_ratio: Annotated[float, Gt(0), Le(1), Doc("share of a layer that the threshold is estimated from")] = 0.01
    clip_norm: Annotated[
        PositiveOrZero, Doc("clip each layer's own gradient to this L2 norm / sqrt(world_size); 0: do not")
    ] = 0.0

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self._sparse(x, self._select(x, num_kept(self.density_for(layer, step), x.numel()), layer, step), step)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return self._bound_for(1 / layer.numel)  # the sample decides how many are sent besides the largest entry

    def _select(self, x: torch.Tensor, k: int, layer: Layer, step: Step) -> torch.Tensor:
        """Return the ascending positions of the entries that reach the sampled threshold, but at most the k largest.

        If a sample would hold too few large entries, they are the k largest of the whole layer.
        """
        stride = int(1 / self.sample_ratio)
        if k == x.numel():
            return torch.arange(k, device=x.device)
        if k < MIN_SAMPLED * stride:
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


# Relative error of the largest magnitude, which is decoded as the last of eight products.
TOP_ROUNDOFF = 1e-6


@dataclasses.dataclass(kw_only=True)
class QSparse(ShareSparsifier, name="qsparse"):
    """Quantised top-k: sends the entries of `topk` with four bits per value, about half its bytes at ratio=0.01.

    Source: Basu et al. 2019 (Qsparse-local-SGD, arXiv:1906.02367): top-k and quantisation composed, with error
    feedback.
    Differs: the magnitudes form a geometric sequence from the smallest entry sent to the largest, and each entry is
    rounded to the nearest one; every step is sent, not the sum of several (strategy `local` does that).

    The rounding error stays in the residual. Sums of such values need more bits: through `ring` they grow to fp32, so
    use `allgather`, which sums nothing on the way.

    Bytes: 24 + min over index codings (indices) + ceil(k / 2) per layer.
    """

    sends: ClassVar[type[Payload]] = SparseLevels

    @override
    @finds_nonfinite
    def encode_sum(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, left: torch.Tensor, layer: Layer, step: Step
    ) -> Payload:
        positions, values = add_and_top_k(
            gradients[0], residual, num_kept(self.density_for(layer, step), layer.numel), left
        )
        if largest_magnitude(values) == math.inf:  # entries that are not finite are among the largest
            raise NonFiniteSum
        payload = self._sparse_values(layer.numel, positions, values, step)
        payload.subtract_from_(left)
        return payload

    @override
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> SparseLevels:
        low, high = magnitude_range(values)
        if low == 0:
            indices, values = indices[values != 0], values[values != 0]
            if not len(values):
                return SparseLevels(numel, indices, 0.0, 0.0, values.new_empty(0, dtype=torch.uint8))
            low, high = magnitude_range(values)
        low, high = min(low, LARGEST), min(high, LARGEST)
        ratio = max(1.0, ctypes.c_float((high / low) ** (1 / (NUM_LEVELS - 1))).value)
        return SparseLevels(numel, indices, low, ratio, pack_nearest_levels(values, low, ratio))

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # The largest entry arrives unchanged, and the others lose at most their own magnitude.
        return 1 - (1 - TOP_ROUNDOFF**2) / layer.numel

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return SparseLevels.packed_nbytes(layer.numel, num_kept(self.ratio, layer.numel))


FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # grid of a layer's ratio, as multiples of the common ratio
COMMON = FACTORS.index(1.0)
BISECTIONS = 40
CURVES = "curves"  # state per layer: squared error at each ratio of the grid, then the number of elements
MEASURED_AT = "measured_at"  # state per layer: the common density at which its curve was measured


@dataclasses.dataclass(kw_only=True)
class AdaptiveTopK(TopK, name="adaptive_topk"):
    """Adaptive top-k: sends the fewest entries whose squared error is at most that of `topk` at the same ratio.

    Source: Markov et al. 2023 (L-GreCo, arXiv:2210.17357): among all choices of a ratio per layer whose total error is
    at most that of one common ratio, take the one with the fewest entries.
    Differs: a Lagrange multiplier over a grid of ratios makes the choice, not dynamic programming. Each rank chooses
    from its own gradients: sparse payloads describe themselves, so ranks need not agree.

    Bytes: 16 + min over index codings (k v + indices) per layer, k between ratio m / 8 and 8 ratio m; at most 16 + m v.
    """

    refresh: Annotated[Count, Doc("steps after which the layers' errors are measured again")] = 100

    @override
    def density_for(self, layer: Layer, step: Step) -> float:
        factors = step.memory.derived("factors", lambda: choose_factors(step.memory.by_layer(CURVES)))
        # the factor is 1 until the layer's errors are measured
        return min(1.0, super().density_for(layer, step) * factors.get(layer.id, 1.0))

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        if self._measures(layer, step):
            density = super().density_for(layer, step)
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
        if measured_at is None or step.index % self.refresh == 0:
            return True
        return float(measured_at) != super().density_for(layer, step)

    @override
    def expected_nbytes(self, layer: Layer) -> None:
        return None

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # 1 - k / m for the smallest k of the grid
        return self._bound_for(num_kept(self.ratio * FACTORS[0], layer.numel) / layer.numel)


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
