"""Arithmetic per block."""

import math

import torch

from collectives.kernels.loop import Parts
from compressors.kernels.triton.rows import row_maxima, row_sums


def block_maxima(x: Parts, block_numel: int) -> torch.Tensor:
    """fp32 [ceil(numel / block_numel)]."""
    return row_maxima(x.flat, block_numel).view(torch.float32)


def block_squares(x: Parts, block_numel: int) -> torch.Tensor:
    """fp64 [ceil(numel / block_numel)]."""
    return row_sums(x.flat, block_numel, "square", math.inf)
