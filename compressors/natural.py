"""Natural compression: every element rounded at random to one of the two nearest powers of two, without bias.

Source: Horvath et al. 2019 (arXiv:1905.10988), section 2.
Differs: exponents count down from the block's largest, so that 8 bits hold sign and exponent (the paper needs 9); what
lies below the smallest power is rounded at random to it or to zero, still without bias.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Literal

import torch
from typing_extensions import Doc

from collectives.kinds.codes import Codes
from compressors._blocks import block_maxima, divided_by_block
from compressors._random import uniform_like
from compressors._stochastic import StochasticQuantizer
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class Natural(StochasticQuantizer):
    """Sign and exponent; the scale of a block is the power of two at or above its largest magnitude.

    Bytes: 24 + 4 ceil(m / block_numel) + ceil(m bits / 8) for a bucket of m elements; 24 where all are zero.
    """

    bits: Annotated[Literal[4, 8], Doc("width of a code: sign and 3 or 7 bits of exponent")] = 8

    @property
    def code_bits(self) -> int:
        """As the option says."""
        return self.bits

    @property
    def num_exponents(self) -> int:
        """Powers of two that a code can name."""
        return (1 << (self.bits - 1)) - 1

    @property
    def variance_bound(self) -> float:
        """1/8 from rounding between powers, and 2 sqrt(n) times the smallest one from what lies below it."""
        return 1 / 8 + 2 * math.sqrt(self.block_numel) * 2.0 ** (1 - self.num_exponents)

    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Codes:
        """Signs, exponents and scales."""
        maxima = block_maxima(x, self.block_numel)
        mantissas, _ = torch.frexp(
            maxima
        )  # maximum = mantissa * 2^exponent, so the quotient is a power of two, exactly
        scales = torch.where(maxima > 0, maxima / mantissas, 0).clamp_(max=2.0**127)
        relative = divided_by_block(x, scales, self.block_numel).clamp_(-1, 1)
        return Codes.from_codes(
            self._codes(relative, uniform_like(x, layer, step)),
            codebook="natural",
            bits=self.bits,
            scales=scales.mul_(self.shrinkage),
            block_numel=self.block_numel,
        )

    def _codes(self, relative: torch.Tensor, chance: torch.Tensor) -> torch.Tensor:
        """Codes of values in [-1, 1]: 0 is zero, j is 2^(1-j), and half the range is added where negative."""
        magnitudes = relative.abs()
        smallest = 2.0 ** (1 - self.num_exponents)
        mantissas, exponents = torch.frexp(magnitudes)
        rises = chance < 2 * mantissas - 1  # a mantissa of 0.5 is the lower power, 1 would be the upper
        codes = 1 - (exponents - 1 + rises)
        below = magnitudes < smallest
        codes = torch.where(below, torch.where(chance * smallest < magnitudes, self.num_exponents, 0), codes)
        negative = (relative < 0) & (codes > 0)
        return codes + negative * (self.num_exponents + 1)
