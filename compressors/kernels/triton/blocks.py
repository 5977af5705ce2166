"""Arithmetic per block."""

import math

import torch

from compressors.kernels.triton.rows import row_maxima, row_sums


def block_maxima(x: torch.Tensor, block_numel: int) -> torch.Tensor:
    """fp32 [ceil(numel / block_numel)]."""
    return row_maxima(x, block_numel).view(torch.float32)


def block_squares(x: torch.Tensor, block_numel: int) -> torch.Tensor:
    """fp64 [ceil(numel / block_numel)]."""
    return row_sums(x, block_numel, "square", math.inf)
