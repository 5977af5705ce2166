"""Eight bits: every block of elements as integers of -127..127 times its own scale.

Source: block-wise linear quantisation as in Dettmers 2016 (arXiv:1511.04561).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.kernels.loop import Parts
from collectives.payloads.base import Payload
from collectives.payloads.codes import Codes
from compressors.base import Granularity, LossyCompressor
from compressors.kernels.quantisation import block_maxima, pack_levels
from compressors.kernels.random import seed_for
from compressors.layer import Layer, Step

LEVELS = 127


@dataclasses.dataclass(kw_only=True)
class Int8(LossyCompressor):
    """scale = max|x| / 127 per block, in fp32; rounding to the nearest level, or at random without bias.

    Bytes: 24 + 4 ceil(m / block_numel) + m for a bucket of m elements; 24 where all are zero.
    """

    sends: ClassVar[type[Payload]] = Codes
    granularity: ClassVar[Granularity] = "bucket"

    block_numel: Annotated[int, Ge(1), Le(8192), Doc("elements per scale")] = 256
    rounding: Annotated[Literal["nearest", "stochastic"], Doc("stochastic is unbiased, with twice the error")] = (
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
        """In blocks of n, n / (4 * 127^2): an element is off by at most half a level, at random in the mean square."""
        return min(self.block_numel, layer.numel) / (4 * LEVELS**2)

    @override
    def expected_nbytes(self, layer: Layer) -> int:
        return Codes.packed_nbytes(layer.numel, 8, block_numel=self.block_numel)
