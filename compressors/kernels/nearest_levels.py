"""Values as the nearest of eight magnitudes in a geometric row, each with its sign."""

from __future__ import annotations

import torch

from collectives.kernels.loop import ByteArray, Double, FloatArray, Int, Loop
from collectives.payloads.codec.bits import pack_bits, packed_nbytes
from collectives.payloads.sparse_levels import BITS, NEGATIVE, levels
from compressors.kernels.magnitudes import magnitudes

_PACK = Loop("pack_nearest_levels", FloatArray, Int, Double, Double, ByteArray)


def pack_nearest_levels(x: torch.Tensor, low: float, ratio: float) -> torch.Tensor:
    """Codes of a `SparseLevels` payload: uint8 [ceil(count / 2)].

    Args:
        x: fp32 [count]; of two magnitudes that are as near the larger is taken; NaN counts as infinite.
        low: of fp32 precision, > 0.
        ratio: likewise, >= 1.
    """
    if _PACK.serves(x):
        packed = torch.empty(packed_nbytes(len(x), BITS), dtype=torch.uint8)
        _PACK(x, len(x), low, ratio, packed)
        return packed
    row = torch.tensor(levels(low, ratio), dtype=torch.float64)
    middles = ((row[1:] + row[:-1]) / 2).float().to(x.device)
    codes = torch.bucketize(magnitudes(x), middles, right=True) + NEGATIVE * (x < 0)
    return pack_bits(codes, BITS)
