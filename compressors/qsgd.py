"""QSGD: every element rounded at random to one of a few levels of its block's norm, without bias.

Source: Alistarh et al. 2017 (arXiv:1610.02132), section 3.1, with buckets as in section 4.
Differs: levels travel at a fixed width instead of Elias codes, which the packed width of 4 bits comes close to.
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
from compressors.kernels.quantisation import block_maxima, block_norms, pack_levels
from compressors.kernels.random import seed_for
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True)
class Qsgd(StochasticQuantizer):
    """value = norm * level / s with s = 2^(bits-1) - 1 levels per sign; the level's expectation is s |x| / norm.

    Bytes: 24 + 4 ceil(m / block_numel) + ceil(m bits / 8) for a bucket of m elements; 24 where all are zero.
    """

    bits: Annotated[Literal[2, 4, 8], Doc("width of a level, sign included")] = 4
    norm: Annotated[Literal["l2", "max"], Doc("scale of a block; max has the smaller error in small blocks")] = "l2"

    @property
    def num_levels(self) -> int:
        """s, the levels per sign above zero."""
        return (1 << (self.bits - 1)) - 1

    @property
    @override
    def code_bits(self) -> int:
        return self.bits

    @property
    def variance_bound(self) -> float:
        """For blocks of n min(n / (4 s^2), sqrt(n) / s): a level's variance is at most 1/4, and its expectation."""
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
