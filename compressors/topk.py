"""Methods that send the largest entries of a layer: `topk`, `threshold`, `dgc` and `qsparse`."""

import ctypes
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Gt, Le
from typing_extensions import Doc, override

from collectives.options import CountOrZero, OptionError, Positive, PositiveOrZero
from collectives.payloads import Payload, Sparse, SparseCodes, SparseLevels
from collectives.payloads.codec.value_codes import MOST_STEPS, SHARED_OVER, ValueCoding, block_length
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.sparse import LARGEST, NUM_LEVELS, IndexedValues
from compressors.base import Sparsifier, Traits
from compressors.kernels import batches
from compressors.kernels.quantisation import pack_nearest_levels
from compressors.kernels.residuals import add_and_find, add_and_measure
from compressors.kernels.selection import (
    kth_largest,
    largest_magnitude,
    magnitude_range,
    reaching,
    sum_of_squares,
    top_k,
)
from compressors.kernels.value_codes import code_values
from compressors.layer import Layer, Step, seed_for
from compressors.parts.buckets import NonFinite, bundled, each_layer, split, summed

ValueDtype = Literal["fp16", "bf16", "fp32"]
Values = Literal["floats", "two_magnitudes", "sigma", "int8"]

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
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> IndexedValues:
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
    def density_for(self, layer: Layer, step: Step) -> float | None:
        return self._share(step)

    def _share(self, step: Step) -> float:
        if step.warmup and step.epoch < self.warmup_epochs:
            return max(self.ratio, 0.25 ** (step.epoch + 1))
        return self.ratio

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self._sparse(x, top_k(x, num_kept(self.density_for(layer, step), x.numel())), step)

    def _code_top_k(
        self,
        gradients: Sequence[torch.Tensor],
        residual: torch.Tensor | None,
        left: torch.Tensor,
        layers: Sequence[Layer],
        step: Step,
        *,
        screen: bool,
    ) -> Payload:
        """Encode the k largest entries of every layer as `_sparse_values` does; arguments are as in `encode_bucket`."""
        numels = [layer.numel for layer in layers]
        ks = [num_kept(self.density_for(layer, step), layer.numel) for layer in layers]
        payloads = []
        selected = batches.top_k_of_layers(gradients, residual, left, numels, ks).split(ks)
        for positions, rest in zip(selected, split(left, layers), strict=True):
            values = rest.index_select(0, positions)
            if screen and largest_magnitude(values) == math.inf:  # entries that are not finite are among the largest
                raise NonFinite
            payloads.append(self._sparse_values(len(rest), positions, values, step))
            payloads[-1].subtract_from_(rest)
        return bundled(payloads)


@dataclasses.dataclass(kw_only=True)
class DensitySparsifier(ShareSparsifier, TypedSparsifier):
    """Base of the methods that send a share of the entries, with options for the share, warm-up and value type."""

    def _sent(
        self,
        left: torch.Tensor,
        numels: Sequence[int],
        counts: Sequence[int],
        positions: torch.Tensor,
        step: Step,
        *,
        screen: bool,
    ) -> Payload:
        """Return `send_from_layers` in this type of values.

        Raises:
            NonFinite: an entry is not finite, but has to be.
        """
        dtype = TORCH_DTYPES[self.value_dtype]
        payload = batches.send_from_layers(left, numels, counts, positions, dtype, step.world_size, finite=screen)
        if payload is None:
            raise NonFinite
        return payload


def num_kept(density: float, numel: int) -> int:
    """Return density * numel, rounded half up, between 1 and numel; 0 if numel is 0."""
    return min(numel, max(1, int(density * numel + 0.5)))


# Relative error of a magnitude that is decoded as a product, or as the last of eight.
TOP_ROUNDOFF = 1e-6


@dataclasses.dataclass(kw_only=True)
class CodingSparsifier(DensitySparsifier):
    """Base of the methods that can also send their entries' values as codes of 2 or 8 bits.

    two_magnitudes: a sign bit, and a bit that chooses one of two magnitudes in bf16. As many values as lie in 4096
        elements (at least 32) share the magnitudes, which five rounds of Lloyd's method from the median find.
    sigma: four levels for all values of a payload, each 1.5 standard deviations wide, and the mean of each level.
    int8: a whole number of steps; values share a step as they share two magnitudes.

    Source: S. P. Lloyd, "Least squares quantization in PCM", IEEE Transactions on Information Theory 28 (1982); sigma:
    the code of SparseLoCo, Sarfi et al. 2025 (arXiv:2508.15706; one-covenant/templar, tplr/compress.py).
    Differs: sigma takes 2 bits per code, not a byte, and its levels' means include the mean of all.

    Raises:
        OptionError: a value_dtype other than fp16, the default, for values that are codes.
    """

    values: Annotated[
        Values, Doc("floats of value_dtype, or codes: 2 bits (two_magnitudes, sigma) or 8 bits per value")
    ] = "floats"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.coding and self.value_dtype != "fp16":
            raise OptionError(
                f"{self.component_name}: values={self.values} sends codes, so value_dtype={self.value_dtype} has no "
                "use; leave value_dtype out, or use values=floats"
            )
        if self.coding:
            self.sends = SparseCodes  # type: ignore[misc]  # instead of the class's

    @property
    def coding(self) -> ValueCoding | None:
        """Return how values are coded; None if they are floats."""
        return None if self.values == "floats" else self.values

    @override
    def _bound_for(self, share: float) -> float:
        match self.coding:
            case None:
                return super()._bound_for(share)
            case "two_magnitudes":
                # n values v of a block keep sum(v)^2 / n of their squares if each becomes their mean magnitude
                return 1 - share * (1 - roundoff("bf16") ** 2) / SHARED_OVER
            case "sigma":
                return 1.0  # all values may lie in one level, whose mean may be zero
            case "int8":
                # each of n values of a block loses at most half a step, which is 1 / 254 of the largest
                return 1 - share * (1 - SHARED_OVER / (2 * MOST_STEPS) ** 2) * (1 - TOP_ROUNDOFF)

    @override
    def _sparse_values(self, numel: int, indices: torch.Tensor, values: torch.Tensor, step: Step) -> IndexedValues:
        if not self.coding:
            return super()._sparse_values(numel, indices, values, step)
        if not values.all():
            indices, values = indices[values != 0], values[values != 0]
        return self._codes(numel, numel, max(1, len(values)), indices, values)

    def _codes(
        self,
        numel: int,
        group_size: int,
        k: int,
        positions: torch.Tensor,
        values: torch.Tensor,
        left: torch.Tensor | None = None,
    ) -> SparseCodes:
        """Return the payload of entries `values`, fp32 [z], as codes.

        Arguments before `values` are as in `SparseCodes`. If `left`, fp32 [numel], is given, the payload is subtracted
        from it.
        """
        assert self.coding
        block, rest = block_length(self.coding, len(values), numel), None if left is None else (positions, left)
        tables, packed, arrived = code_values(values, self.coding, block, rest)
        return SparseCodes(numel, group_size, k, positions, self.coding, tables, packed).holding(arrived)


@dataclasses.dataclass(kw_only=True)
class TopK(CodingSparsifier, name="topk"):
    """Top-k: sends the entries of largest magnitude of every layer.

    Source: Aji, Heafield 2017 (arXiv:1704.05021); error feedback: Stich, Cordonnier, Jaggi 2018 (arXiv:1809.07599).

    A layer of m elements sends k = ratio * m entries, rounded half up, at least 1. Of equal magnitudes the first is
    sent. Entries that are zero on the wire are left out. values=two_magnitudes sends them in 2 bits instead of 16, with
    a fifth to a half of the squared error of the published code (values=sigma). With error feedback the error stays in
    the residual. Collectives that cut or add payloads, such as `ring`, send 16 bits per value (sigma, int8: 32);
    `allgather` sends the codes.

    Bytes: 16 + min over index codings (k v + indices) per layer, with v bytes per value; at most 16 + m v. Coordinates
    take k i bytes, with i = 1 up to 256 elements, 2 up to 65536, else 4; a bitmap takes m / 8. For codes of b bits:
    24 + ceil(k b / 8) + indices + 4 per 4096 elements, or per 32 values if fewer lie there (sigma: 16); coordinates
    take ceil(k ceil(log2 m) / 8).
    """

    sends: ClassVar[type[Payload]] = Sparse

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
        if left is None or not batches.serves(left):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        if self.coding:
            return self._code_top_k(gradients, residual, left, layers, step, screen=screen)
        numels = [layer.numel for layer in layers]
        ks = [num_kept(self.density_for(layer, step), layer.numel) for layer in layers]
        positions = batches.top_k_of_layers(gradients, residual, left, numels, ks)
        return self._sent(left, numels, ks, positions, step, screen=screen)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # The k largest of m entries hold at least k / m of |x|^2.
        return self._bound_for(num_kept(self.ratio, layer.numel) / layer.numel)

    @override
    def expected_nbytes(self, layer: Layer) -> int | None:
        k = num_kept(self.ratio, layer.numel)
        if self.coding:
            return SparseCodes.packed_nbytes(layer.numel, layer.numel, k, self.coding)
        return Sparse.packed_nbytes(layer.numel, k, TORCH_DTYPES[self.value_dtype])


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
        if self.unit == "rms" or residual is None or left is None:
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)

        def encode(gradient: torch.Tensor, residual: torch.Tensor, left: torch.Tensor, layer: Layer) -> Payload:
            if self.unit == "max":
                _, largest = add_and_measure(gradient, residual, left)
                payload = self._sparse(left, reaching(left, self._level(largest, largest)), step)
            else:
                _, positions, values = add_and_find(gradient, residual, self.threshold, left)
                payload = self._sparse_values(layer.numel, positions, values, step)
            payload.subtract_from_(left)
            return payload

        return each_layer(encode, gradients, residual, left, layers, screen=screen)

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
        if left is None or not batches.serves(left):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        numels = [layer.numel for layer in layers]
        ks = [num_kept(self.density_for(layer, step), layer.numel) for layer in layers]
        if max(ks) < self._fewest_sampled:
            positions = batches.top_k_of_layers(gradients, residual, left, numels, ks)
        else:
            xs = summed(gradients, residual, left, layers, screen=screen)
            selected = [self._select(*each, step) for each in zip(xs, ks, layers, strict=True)]
            positions, ks = torch.cat(selected), [len(each) for each in selected]
        return self._sent(left, numels, ks, positions, step, screen=screen)

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        return self._sparse(x, self._select(x, num_kept(self.density_for(layer, step), x.numel()), layer, step), step)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        return self._bound_for(1 / layer.numel)  # the sample decides how many are sent besides the largest entry

    @property
    def _fewest_sampled(self) -> int:
        # the smallest number of entries to send for which a sample holds enough of them
        return MIN_SAMPLED * int(1 / self.sample_ratio)

    def _select(self, x: torch.Tensor, k: int, layer: Layer, step: Step) -> torch.Tensor:
        """Return the ascending positions of the entries that reach the sampled threshold, but at most the k largest.

        If a sample would hold too few large entries, they are the k largest of the whole layer.
        """
        stride = int(1 / self.sample_ratio)
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
        if left is None or not batches.serves(left):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        return self._code_top_k(gradients, residual, left, layers, step, screen=screen)

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
