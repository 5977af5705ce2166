"""One bit per element, set where it is not negative, and the sums that say what a bit stands for."""

from __future__ import annotations

import torch

from collectives.kernels.loop import ByteArray, Double, DoubleArray, FloatArray, Int, Loop, also_on_gpus
from collectives.payloads.codec.bits import pack_bits
from compressors.kernels.magnitudes import folded_sum, sum_of_magnitudes

_WITH_MAGNITUDE = Loop("signs_and_magnitude", FloatArray, Int, ByteArray, returns=Double)
_WITH_SUMS = Loop("signs_and_sums", FloatArray, Int, ByteArray, DoubleArray, returns=Int)
_ADD_WITH_MAGNITUDE = Loop(
    "add_signs_and_magnitude", FloatArray, FloatArray, Int, ByteArray, FloatArray, returns=Double
)
_ADD_WITH_SUMS = Loop(
    "add_signs_and_sums", FloatArray, FloatArray, Int, ByteArray, DoubleArray, FloatArray, returns=Int
)


@also_on_gpus
def signs_and_magnitude(x: torch.Tensor, out: torch.Tensor) -> float:
    """Write the bits of fp32 [numel] to uint8 [ceil(numel / 8)]; the sum of magnitudes in fp64. NaN is negative."""
    if _WITH_MAGNITUDE.serves(x):
        return float(_WITH_MAGNITUDE(x.contiguous(), x.numel(), out))
    out.copy_(pack_bits(x >= 0, 1))
    return sum_of_magnitudes(x)


@also_on_gpus
def signs_and_sums(x: torch.Tensor, out: torch.Tensor) -> tuple[int, float, float]:
    """Write the bits as above; how many are set, and the sums in fp64 of those elements and of the others."""
    if _WITH_SUMS.serves(x):
        sums = torch.empty(2, dtype=torch.float64)
        num_set = _WITH_SUMS(x.contiguous(), x.numel(), out, sums)
        return num_set, float(sums[0]), float(sums[1])
    is_set = x >= 0
    above, below = (folded_sum(torch.where(where, x, 0.0).double()) for where in (is_set, ~is_set))
    out.copy_(pack_bits(is_set, 1))
    return int(is_set.sum()), float(above), float(below)


def add_signs_and_magnitude(
    gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, total: torch.Tensor
) -> float:
    """`signs_and_magnitude` of gradient + residual, fp32 [numel] each, which is written to `total` in the same pass."""
    if _ADD_WITH_MAGNITUDE.serves(gradient, residual):
        return float(_ADD_WITH_MAGNITUDE(gradient, residual, len(total), out, total))
    return signs_and_magnitude(torch.add(gradient, residual, out=total), out)


def add_signs_and_sums(
    gradient: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, total: torch.Tensor
) -> tuple[int, float, float]:
    """`signs_and_sums` likewise."""
    if _ADD_WITH_SUMS.serves(gradient, residual):
        sums = torch.empty(2, dtype=torch.float64)
        num_set = _ADD_WITH_SUMS(gradient, residual, len(total), out, sums, total)
        return num_set, float(sums[0]), float(sums[1])
    return signs_and_sums(torch.add(gradient, residual, out=total), out)
