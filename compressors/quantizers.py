"""Quantisers: `qsgd`, `natural` and `int8` with a scale per block, `terngrad` with a scale that ranks can share."""

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.kernels.loop import Parts
from collectives.options import OptionError, PositiveOrZero
from collectives.payloads import Codes, Dense, Payload
from collectives.payloads.base import HEADER_BYTES
from collectives.transport.base import Transport
from compressors.base import DenseEnds, ErrorFeedback, Given, MinNumel, PerLayer, Skip, Traits
from compressors.floats import PartsEncoder
from compressors.kernels import batches
from compressors.kernels.quantisation import (
    CODES,
    LEVELS,
    block_maxima,
    block_norms,
    level_dtype,
    pack_levels,
    pack_powers,
    random_ternary,
)
from compressors.kernels.selection import squares_and_largest, sum_of_magnitudes, sum_of_squares
from compressors.layer import Layer, Step, seed_for
from compressors.parts.buckets import NonFinite, is_finite

BlockNumel = Annotated[int, Ge(8), Le(1 << 20), Doc("elements per scale")]


def shrinkage(variance_bound: float, *, error_feedback: bool) -> float:
    """Return the factor by which a quantiser that rounds at random, without bias, multiplies all its scales.

    Error feedback needs a contraction. An unbiased quantiser Q with E|Q(x) - x|^2 <= w |x|^2 is not a contraction, but
    Q(x) / (1 + w) is (Karimireddy et al. 2019, arXiv:1901.09847, remark 7; scaling: Horvath et al. 2019,
    arXiv:1905.10988).
    """
    return 1 / (1 + variance_bound) if error_feedback else 1.0


def num_magnitudes(bits: int) -> int:
    """Return the number of magnitudes above zero that a code of one sign bit and `bits` - 1 other bits can express."""
    return (1 << (bits - 1)) - 1


@dataclasses.dataclass(kw_only=True)
class Qsgd(PartsEncoder, name="qsgd"):
    """QSGD: rounds every element at random, without bias, to one of a few levels of its block's norm.

    Source: Alistarh et al. 2017 (arXiv:1610.02132), section 3.1, with buckets as in section 4.
    Differs: levels have a fixed width, not Elias codes, which are about as long as 4 bits per level.

    value = norm * level / s, with s = 2^(bits-1) - 1 levels per sign; the expectation of a level is s |x| / norm.

    Bytes: 24 + 4 ceil(m / block_numel) + ceil(m bits / 8) for a bucket of m elements; 24 if all are zero.
    """

    sends: ClassVar[type[Payload]] = Codes
    biased: ClassVar[bool] = False

    block_numel: BlockNumel = 512
    bits: Annotated[Literal[2, 4, 8], Doc("bits per element, sign included")] = 4
    norm: Annotated[Literal["l2", "max"], Doc("scale of a block; max has the smaller error in small blocks")] = "l2"

    @property
    def variance_bound(self) -> float:
        """Return w in E|Q(x) - x|^2 <= w |x|^2: min(n / (4 s^2), sqrt(n) / s) for blocks of n elements and s levels.

        This holds because the variance of a level is at most 1/4, and at most the level's expectation.
        """
        num_levels = num_magnitudes(self.bits)
        return min(self.block_numel / (4 * num_levels**2), math.sqrt(self.block_numel) / num_levels)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # w, or w / (1 + w) with error feedback; both in expectation
        return self.variance_bound * shrinkage(self.variance_bound, error_feedback=self.error_feedback)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, self.bits, block_numel=self.block_numel)

    @override
    def encode_parts(self, x: Parts, layer: Layer, step: Step) -> Codes:
        norms = block_norms(x, self.block_numel) if self.norm == "l2" else block_maxima(x, self.block_numel)
        key = seed_for(layer, step, per_rank=True)
        packed = Codes.room_for_codes(x.numel, self.bits, x.device, block_numel=self.block_numel)
        pack_levels(
            x, norms, self.block_numel, bits=self.bits, multiplier=num_magnitudes(self.bits), key=key, out=packed
        )
        scales = norms.mul_(
            shrinkage(self.variance_bound, error_feedback=self.error_feedback) / num_magnitudes(self.bits)
        )
        return Codes(x.numel, "levels", self.bits, packed, scales, self.block_numel)


@dataclasses.dataclass(kw_only=True)
class Natural(PartsEncoder, name="natural"):
    """Natural compression: rounds every element at random, without bias, to one of the nearest powers of two.

    Source: Horvath et al. 2019 (arXiv:1905.10988), section 2.
    Differs: exponents are relative to the block's largest, so that 8 bits hold sign and exponent (the paper needs 9).
    Elements below the smallest power are rounded at random to this power or to zero, still without bias.

    A code is a sign and an exponent. The scale of a block is the smallest power of two that is not below the block's
    largest magnitude.

    Bytes: 24 + 4 ceil(m / block_numel) + ceil(m bits / 8) for a bucket of m elements; 24 if all are zero.
    """

    sends: ClassVar[type[Payload]] = Codes
    biased: ClassVar[bool] = False

    block_numel: BlockNumel = 512
    bits: Annotated[Literal[4, 8], Doc("bits per element: sign and 3 or 7 bits of exponent")] = 8

    @property
    def variance_bound(self) -> float:
        """Return w in E|Q(x) - x|^2 <= w |x|^2: 1/8 plus 2 sqrt(n) times the smallest power, for blocks of n elements.

        Rounding between two powers adds at most 1/8; elements below the smallest power add the second term.
        """
        return 1 / 8 + 2 * math.sqrt(self.block_numel) * 2.0 ** (1 - num_magnitudes(self.bits))

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # w, or w / (1 + w) with error feedback; both in expectation
        return self.variance_bound * shrinkage(self.variance_bound, error_feedback=self.error_feedback)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, self.bits, block_numel=self.block_numel)

    @override
    def encode_parts(self, x: Parts, layer: Layer, step: Step) -> Codes:
        maxima = block_maxima(x, self.block_numel)
        # maximum = mantissa * 2^exponent, so maximum / mantissa is exactly a power of two.
        mantissas, _ = torch.frexp(maxima)
        scales = torch.where(maxima > 0, maxima / mantissas, 0).clamp_(max=2.0**127)
        packed = Codes.room_for_codes(x.numel, self.bits, x.device, block_numel=self.block_numel)
        pack_powers(x, scales, self.block_numel, bits=self.bits, key=seed_for(layer, step, per_rank=True), out=packed)
        return Codes(
            x.numel,
            "natural",
            self.bits,
            packed,
            scales.mul_(shrinkage(self.variance_bound, error_feedback=self.error_feedback)),
            self.block_numel,
        )


INT8_LEVELS = 127  # per sign


@dataclasses.dataclass(kw_only=True)
class Int8(PartsEncoder, name="int8"):
    """Eight bits: sends every element as an integer in -127..127 times the scale of its block.

    Source: block-wise linear quantisation as in Dettmers 2016 (arXiv:1511.04561).

    The scale of a block is max|x| / 127, in fp32. Elements are rounded to the nearest level, or at random without bias.

    Bytes: 24 + 4 ceil(m / block_numel) + m for a bucket of m elements; 24 if all are zero.
    """

    sends: ClassVar[type[Payload]] = Codes

    block_numel: Annotated[int, Ge(1), Le(8192), Doc("elements per scale")] = 256
    rounding: Annotated[Literal["nearest", "stochastic"], Doc("stochastic is unbiased but has twice the error")] = (
        "nearest"
    )

    @override
    def encode_parts(self, x: Parts, layer: Layer, step: Step) -> Codes:
        scales = block_maxima(x, self.block_numel).div_(INT8_LEVELS)
        key = seed_for(layer, step, per_rank=True) if self.rounding == "stochastic" else None
        packed = Codes.room_for_codes(x.numel, 8, x.device, block_numel=self.block_numel)
        pack_levels(x, scales, self.block_numel, bits=8, key=key, out=packed)
        return Codes(x.numel, "levels", 8, packed, scales, self.block_numel)

    @override
    def contraction_bound(self, layer: Layer) -> float:
        # An element's error is at most half a level; with random rounding, this bounds the root of its mean square.
        return min(self.block_numel, layer.numel) / (4 * INT8_LEVELS**2)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, 8, block_numel=self.block_numel)


@dataclasses.dataclass(kw_only=True)
class SharedScale(PerLayer):
    """Base of the methods that can send integer levels, with one scale per layer that all ranks share.

    Attributes:
        combine: the operation that computes the shared scale from the scales of all ranks.
    """

    averages: ClassVar[bool] = False
    combine: ClassVar[Literal["max", "mean"]]

    error_feedback: ErrorFeedback = False
    min_numel: MinNumel = 0
    skip: Skip = ()
    dense_ends: DenseEnds = False

    def kind_for(self, layer: Layer) -> type[Payload]:
        """Return the class of the payload that `encode` returns for this layer after any warm-up."""
        return Dense if self.shares_scale(layer) else Codes

    def shares_scale(self, layer: Layer) -> bool:
        """Return True if this layer is sent as levels with a shared scale; by default the same for all layers."""
        return self.traits.needs_all_ranks

    @abc.abstractmethod
    def local_scale(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's scale for `x`, fp32 [1]; 0 if there is nothing to send."""

    def rounded_scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the shared scales, fp32 of any shape, rounded as the method needs; by default unchanged."""
        return scale

    def agree(self, given: Given, step: Step, transport: Transport) -> None:
        """Agree with the other ranks on the scales for `encode`, and write the scales to `step.memory.scales`.

        If `traits.needs_all_ranks`, every rank must call this method before it encodes.

        Args:
            given: the layers and tensors that will be passed to `encode`.
            step: the current step.
            transport: connects the ranks.
        """
        own = {layer.id: float(self.local_scale(x)) for layer, x in given if self.shares_scale(layer)}
        if not own:
            return
        scales = transport.all_reduce_scalars([*own.values()], "max" if self.combine == "max" else "sum")
        if self.combine == "mean":
            scales = [total / step.world_size for total in scales]
        rounded = self.rounded_scale(torch.tensor(scales, dtype=torch.float32))
        step.memory.scales.update(zip(own, rounded.tolist(), strict=True))

    @override
    def _subtract(self, x: torch.Tensor, payload: Payload, layer: Layer, step: Step) -> None:
        if self.shares_scale(layer):
            x.sub_(payload.values, alpha=step.memory.scales[layer.id])
        else:
            super()._subtract(x, payload, layer, step)

    @override
    def finish(self, total: Payload, layer: Layer, step: Step, updates: Sequence[torch.Tensor]) -> None:
        super().finish(total, layer, step, updates)
        if self.shares_scale(layer):
            for update in updates:
                update.mul_(step.memory.scales[layer.id])


@dataclasses.dataclass(kw_only=True)
class TernGrad(SharedScale, name="terngrad"):
    """TernGrad: rounds every element at random to -s, 0 or +s, with s the layer's largest magnitude after clipping.

    Source: Wen et al. 2017 (arXiv:1705.07878), equations 2 to 4; clipping: section 3.3; a scale shared by all ranks:
    section 3.4.
    Differs: sigma is the root mean square, that is, the standard deviation around 0. With the standard deviation around
    the mean, a flat gradient would be clipped to nothing. With error feedback, the values sent are smaller than s, by a
    factor that depends on the variance of the rounding, so that the method is a contraction.

    An element x becomes s or -s, according to its sign, with probability |x| / s, and otherwise 0; this is unbiased for
    elements that are not clipped.

    Bytes: 28 + ceil(m / 4) per layer of m elements, 24 for a layer of zeros; with shared_scale 16 + m (up to 127
    ranks), plus 8 control bytes.

    Raises:
        OptionError: both shared_scale and error_feedback are true.
    """

    sends: ClassVar[type[Payload]] = Codes
    biased: ClassVar[bool] = True  # because of clipping; the rounding is unbiased
    combine: ClassVar[Literal["max", "mean"]] = "max"

    clip_sigmas: Annotated[
        PositiveOrZero, Doc("clip at this multiple of the layer's root mean square; 0: no clipping")
    ] = 2.5
    shared_scale: Annotated[
        bool, Doc("use one scale for all ranks: sums are then integers, which suit collective ring")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shared_scale and self.error_feedback:
            raise OptionError("terngrad: shared_scale=true and error_feedback=true exclude each other; leave one out")

    @functools.cached_property
    @override
    def traits(self) -> Traits:
        emits = super().traits.emits - {Codes} | {Dense if self.shared_scale else Codes}
        return dataclasses.replace(super().traits, emits=emits, needs_all_ranks=self.shared_scale)

    @override
    def local_scale(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_tensor([min(self._limit_and_largest(x))])

    @override
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Payload:
        limit, largest = self._limit_and_largest(x)
        key = seed_for(layer, step, per_rank=True)
        if self.shared_scale:
            levels = random_ternary(x, step.memory.scales[layer.id], key, LEVELS, limit=limit)
            return Dense(levels.to(level_dtype(step.world_size)))
        scale = min(limit, largest)
        codes = random_ternary(x, scale, key, CODES, limit=limit)
        if self.error_feedback and scale > 0:  # multiplied by 1 / (1 + variance)
            scale = sum_of_squares(x, limit) / sum_of_magnitudes(x, limit)
        return Codes(x.numel(), "ternary", CODES, codes, x.new_tensor([scale]))

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
        if self.shared_scale or left is not None or not batches.serves(*gradients):
            return super().encode_bucket(gradients, residual, left, layers, step, screen=screen)
        keys = [seed_for(layer, step, per_rank=True) for layer in layers]
        if screen and not all(map(is_finite, gradients)):
            raise NonFinite
        return batches.random_ternary_of_layers(gradients, self.clip_sigmas, keys)

    def contraction_bound(self, layer: Layer) -> float | None:
        """Return a bound of the expected error: without clipping w - 1, or 1 - 1 / w with error feedback.

        It follows from s |x|_1 <= w |x|^2 with w = (sqrt(m) + 1) / 2. With clipping, let y be x clipped at k root mean
        squares, and u = |y| / |x|. Clipping loses at most |x|^2 - |y|^2. Rounding loses s |y|_1 - |y|^2, where s |y|_1
        is at most w |y|^2 and at most k |x| |y|. So together they lose at most 1 + (w - 2) u^2, and at most
        1 + k u - 2 u^2, of |x|^2. With error feedback at least (x, y) / w is gained, where (x, y) is at least
        min(1, k / sqrt(m)) |x|^2. With a shared scale, return None: there is no bound, because another rank's scale may
        be arbitrarily larger.
        """
        if self.shared_scale:
            return None
        most, clip = (math.sqrt(layer.numel) + 1) / 2, self.clip_sigmas
        if self.error_feedback:
            return 1 - (min(1.0, clip / math.sqrt(layer.numel)) if clip else 1.0) / most
        if not clip:
            return most - 1
        peak = min(1.0, clip / 4)  # where 1 + k u - 2 u^2 is largest
        return min(max(1.0, most - 1), 1 + clip * peak - 2 * peak**2)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        # Shared levels have 8 bits, for up to 127 ranks.
        return HEADER_BYTES + layer.numel if self.shared_scale else Codes.packed_nbytes(layer.numel, 2)

    def _limit_and_largest(self, x: torch.Tensor) -> tuple[float, float]:
        # the magnitude at which `x` is clipped, and the largest magnitude of `x`; both exact in fp32
        squares, largest = squares_and_largest(x)
        limit = torch.tensor(self.clip_sigmas * math.sqrt(squares / x.numel()), dtype=torch.float32)
        return float(limit) if self.clip_sigmas else math.inf, largest
