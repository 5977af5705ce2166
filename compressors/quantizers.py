"""Quantisers with one scale per block of elements: `qsgd`, `natural` and `int8`."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.kernels.loop import Parts
from collectives.payloads.base import Payload
from collectives.payloads.codes import Codes
from compressors.base import Granularity, LossyCompressor
from compressors.kernels.quantisation import block_maxima, block_norms, pack_levels, pack_powers
from compressors.kernels.random import seed_for
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class StochasticQuantizer(LossyCompressor):
    """Base of the quantisers that round at random, without bias, with one scale per block of a bucket.

    Source: Karimireddy et al. 2019 (arXiv:1901.09847), remark 7; Horvath et al. 2019 (arXiv:1905.10988) for the
    scaling.

    Error feedback needs a contraction. An unbiased quantiser with E|Q(x) - x|^2 <= w |x|^2 is none, but Q(x) / (1 + w)
    is one. So the scales are divided by 1 + w if error feedback is on.
    """

    sends: ClassVar[type[Payload]] = Codes
    biased: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "bucket"

    block_numel: Annotated[int, Ge(8), Le(1 << 20), Doc("elements per scale")] = 512

    @property
    @abc.abstractmethod
    def code_bits(self) -> int:
        """Return the number of bits per code."""

    @property
    @abc.abstractmethod
    def variance_bound(self) -> float:
        """Return the w in E|Q(x) - x|^2 <= w |x|^2."""

    @property
    def shrinkage(self) -> float:
        """Return the factor applied to the scales: 1, or 1 / (1 + w) with error feedback."""
        return 1 / (1 + self.variance_bound) if self.error_feedback else 1.0

    def contraction_bound(self, layer: Layer) -> float:
        """Return w, or w / (1 + w) with error feedback; both hold in expectation."""
        return self.variance_bound * self.shrinkage

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, self.code_bits, block_numel=self.block_numel)


@dataclasses.dataclass(kw_only=True)
class Qsgd(StochasticQuantizer, name="qsgd"):
    """QSGD: rounds every element at random, without bias, to one of a few levels of its block's norm.

    Source: Alistarh et al. 2017 (arXiv:1610.02132), section 3.1, with buckets as in section 4.
    Differs: levels have a fixed width instead of Elias codes, which are about as short as 4 bits per level.

    value = norm * level / s, with s = 2^(bits-1) - 1 levels per sign; the expectation of a level is s |x| / norm.

    Bytes: 24 + 4 ceil(m / block_numel) + ceil(m bits / 8) for a bucket of m elements; 24 if all are zero.
    """

    bits: Annotated[Literal[2, 4, 8], Doc("bits per element, sign included")] = 4
    norm: Annotated[Literal["l2", "max"], Doc("scale of a block; max has the smaller error in small blocks")] = "l2"

    @property
    def num_levels(self) -> int:
        """Return s, the number of levels above zero per sign."""
        return (1 << (self.bits - 1)) - 1

    @property
    @override
    def code_bits(self) -> int:
        return self.bits

    @property
    def variance_bound(self) -> float:
        """Return min(n / (4 s^2), sqrt(n) / s) for blocks of n elements.

        The variance of a level is at most 1/4, and at most its expectation.
        """
        return min(self.block_numel / (4 * self.num_levels**2), math.sqrt(self.block_numel) / self.num_levels)

    @override
    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Codes:
        x = Parts(gradients)
        measure = block_norms if self.norm == "l2" else block_maxima
        norms = measure(x, self.block_numel)
        key = seed_for(layer, step, per_rank=True)
        packed = Codes.room(x.numel, self.bits, x.device, block_numel=self.block_numel)
        pack_levels(x, norms, self.block_numel, bits=self.bits, multiplier=self.num_levels, key=key, out=packed)
        scales = norms.mul_(self.shrinkage / self.num_levels)
        return Codes(x.numel, "levels", self.bits, packed, scales, self.block_numel)


@dataclasses.dataclass(kw_only=True)
class Natural(StochasticQuantizer, name="natural"):
    """Natural compression: rounds every element at random, without bias, to one of the nearest powers of two.

    Source: Horvath et al. 2019 (arXiv:1905.10988), section 2.
    Differs: exponents are relative to the block's largest, so that 8 bits hold sign and exponent (the paper needs 9);
    elements below the smallest power are rounded at random to it or to zero, still without bias.

    A code is a sign and an exponent. The scale of a block is the smallest power of two at or above its largest
    magnitude.

    Bytes: 24 + 4 ceil(m / block_numel) + ceil(m bits / 8) for a bucket of m elements; 24 if all are zero.
    """

    bits: Annotated[Literal[4, 8], Doc("bits per element: sign and 3 or 7 bits of exponent")] = 8

    @property
    @override
    def code_bits(self) -> int:
        return self.bits

    @property
    def num_exponents(self) -> int:
        """Return the number of powers of two that a code can express."""
        return (1 << (self.bits - 1)) - 1

    @property
    def variance_bound(self) -> float:
        """Return 1/8, from rounding between powers, plus 2 sqrt(n) times the smallest power, from elements below it."""
        return 1 / 8 + 2 * math.sqrt(self.block_numel) * 2.0 ** (1 - self.num_exponents)

    @override
    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Codes:
        x = Parts(gradients)
        maxima = block_maxima(x, self.block_numel)
        # maximum = mantissa * 2^exponent, so maximum / mantissa is exactly a power of two.
        mantissas, _ = torch.frexp(maxima)
        scales = torch.where(maxima > 0, maxima / mantissas, 0).clamp_(max=2.0**127)
        packed = Codes.room(x.numel, self.bits, x.device, block_numel=self.block_numel)
        key = seed_for(layer, step, per_rank=True)
        pack_powers(x, scales, self.block_numel, bits=self.bits, key=key, out=packed)
        return Codes(x.numel, "natural", self.bits, packed, scales.mul_(self.shrinkage), self.block_numel)


LEVELS = 127  # per sign


@dataclasses.dataclass(kw_only=True)
class Int8(LossyCompressor, name="int8"):
    """Eight bits: sends every element as an integer in -127..127 times the scale of its block.

    Source: block-wise linear quantisation as in Dettmers 2016 (arXiv:1511.04561).

    The scale of a block is max|x| / 127, in fp32. Elements are rounded to the nearest level, or at random without bias.

    Bytes: 24 + 4 ceil(m / block_numel) + m for a bucket of m elements; 24 if all are zero.
    """

    sends: ClassVar[type[Payload]] = Codes
    granularity: ClassVar[Granularity] = "bucket"

    block_numel: Annotated[int, Ge(1), Le(8192), Doc("elements per scale")] = 256
    rounding: Annotated[Literal["nearest", "stochastic"], Doc("stochastic is unbiased but has twice the error")] = (
        "nearest"
    )

    @override
    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Codes:
        x = Parts(gradients)
        scales = block_maxima(x, self.block_numel).div_(LEVELS)
        key = seed_for(layer, step, per_rank=True) if self.rounding == "stochastic" else None
        packed = Codes.room(x.numel, 8, x.device, block_numel=self.block_numel)
        pack_levels(x, scales, self.block_numel, bits=8, key=key, out=packed)
        return Codes(x.numel, "levels", 8, packed, scales, self.block_numel)

    def contraction_bound(self, layer: Layer) -> float:
        """Return n / (4 * 127^2) for blocks of n elements.

        An element's error is at most half a level; with random rounding, its root mean square is.
        """
        return min(self.block_numel, layer.numel) / (4 * LEVELS**2)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, 8, block_numel=self.block_numel)
