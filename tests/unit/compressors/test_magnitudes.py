"""Bits of magnitudes are ordered like the magnitudes."""

from __future__ import annotations

import math

import pytest
import torch

from compressors.kernels.selection import INFINITE, level_bits


@pytest.mark.parametrize("level", [0.0, -0.0, 1.0, 1 / 3, 1e-45, 1e-50, 3.4028235e38, 1e39, math.inf, -math.inf, -1.0])
def test_they_are_those_of_the_nearest_fp32(level: float) -> None:
    nearest = torch.tensor(max(level, 0.0), dtype=torch.float32).abs()
    assert level_bits(level) == int(nearest.view(torch.int32))


def test_nan_counts_as_infinite() -> None:
    assert level_bits(math.nan) == level_bits(math.inf) == INFINITE
