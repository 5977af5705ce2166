"""Natural compression: every element rounded at random to one of the two nearest powers of two, without bias.

Source: Horvath et al. 2019 (arXiv:1905.10988), section 2.
Differs: exponents count down from the block's largest, so that 8 bits hold sign and exponent (the paper needs 9); what
lies below the smallest power is rounded at random to it or to zero, still without bias.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from typing_extensions import Doc, override

from collectives.kernels.loop import Parts
from collectives.payloads.codes import Codes
from compressors.families.stochastic_quantizer import StochasticQuantizer
from compressors.kernels.quantisation import block_maxima, pack_powers
from compressors.kernels.random import seed_for
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class Natural(StochasticQuantizer):
    """Sign and exponent; the scale of a block is the power of two at or above its largest magnitude.

    Bytes: 24 + 4 ceil(m / block_numel) + ceil(m bits / 8) for a bucket of m elements; 24 where all are zero.
    """

    bits: Annotated[Literal[4, 8], Doc("width of a code: sign and 3 or 7 bits of exponent")] = 8

    @property
    @override
    def code_bits(self) -> int:
        return self.bits

    @property
    def num_exponents(self) -> int:
        """Powers of two that a code can name."""
        return (1 << (self.bits - 1)) - 1

    @property
    def variance_bound(self) -> float:
        """1/8 from rounding between powers, and 2 sqrt(n) times the smallest one from what lies below it."""
        return 1 / 8 + 2 * math.sqrt(self.block_numel) * 2.0 ** (1 - self.num_exponents)

    @override
    def encode_parts(self, gradients: Sequence[torch.Tensor], layer: Layer, step: Step) -> Codes:
        x = Parts(gradients)
        maxima = block_maxima(x, self.block_numel)
        mantissas, _ = torch.frexp(
            maxima
        )  # maximum = mantissa * 2^exponent, so the quotient is a power of two, exactly
        scales = torch.where(maxima > 0, maxima / mantissas, 0).clamp_(max=2.0**127)
        packed = Codes.room(x.numel, self.bits, x.device, block_numel=self.block_numel)
        key = seed_for(layer, step, per_rank=True)
        pack_powers(x, scales, self.block_numel, bits=self.bits, key=key, out=packed)
        return Codes(x.numel, "natural", self.bits, packed, scales.mul_(self.shrinkage), self.block_numel)
