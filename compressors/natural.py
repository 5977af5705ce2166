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
from typing_extensions import Doc, override

from collectives.payloads.codes import Codes
from compressors.families.stochastic_quantizer import StochasticQuantizer
from compressors.kernels.blocks import block_maxima, divided_by_block
from compressors.kernels.random import generator_for
from compressors.layer import Layer, Step

MANTISSA_BITS = 23  # of fp32
EXPONENT_OF_ONE = 127  # how fp32 writes 2^0


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
    def encode(self, x: torch.Tensor, layer: Layer, step: Step) -> Codes:
        maxima = block_maxima(x, self.block_numel)
        mantissas, _ = torch.frexp(
            maxima
        )  # maximum = mantissa * 2^exponent, so the quotient is a power of two, exactly
        scales = torch.where(maxima > 0, maxima / mantissas, 0).clamp_(max=2.0**127)
        relative = divided_by_block(x, scales, self.block_numel).clamp_(-1, 1)
        return Codes.from_codes(
            self._codes(relative, generator_for(layer, step, x.device, per_rank=True)),
            codebook="natural",
            bits=self.bits,
            scales=scales.mul_(self.shrinkage),
            block_numel=self.block_numel,
        )

    def _codes(self, relative: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Codes of values in [-1, 1]: 0 is zero, j is 2^(1-j), and half the range is added where negative.

        A random number added to the mantissa's bits carries into the exponent with the probability that is wanted.
        """
        bits = relative.view(torch.int32)
        magnitudes = bits & 0x7FFFFFFF
        chance = torch.randint(
            1 << MANTISSA_BITS, bits.shape, generator=generator, dtype=torch.int32, device=bits.device
        )
        smallest = EXPONENT_OF_ONE + 1 - self.num_exponents  # the last exponent that a code can name
        below = magnitudes < smallest << MANTISSA_BITS
        if below.any():
            share = relative.abs() * (
                2.0 ** (MANTISSA_BITS + self.num_exponents - 1)
            )  # of the smallest power, in chances
            magnitudes = torch.where(
                below, torch.where(chance < share, smallest, smallest - 1) << MANTISSA_BITS, magnitudes
            )
            chance.masked_fill_(below, 0)
        exponents = (magnitudes + chance) >> MANTISSA_BITS
        codes = exponents.sub_(EXPONENT_OF_ONE + 1).neg_().to(torch.uint8)
        codes.masked_fill_(codes > self.num_exponents, 0)
        return codes + (bits < 0).to(torch.uint8) * (codes > 0) * (self.num_exponents + 1)
