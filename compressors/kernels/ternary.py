"""Three values per element: -1, 0, +1 times a threshold, two bits each, four to a byte with the first on top.

Source: MXNet's two-bit gradient compression (Apache MXNet, src/kvstore/gradient_compression-inl.h): 11 is +, 10 is -,
00 is nothing sent; 01 never occurs.
"""

from __future__ import annotations

import torch

from collectives.payloads.codes import Codes


def ternary_levels(x: torch.Tensor, threshold: torch.Tensor | float) -> torch.Tensor:
    """+1 where x >= threshold, -1 where x <= -threshold, else 0: int8 [numel]. `threshold` > 0."""
    return (x >= threshold).to(torch.int8).sub_((x <= -threshold).to(torch.int8))


def ternary_payload(levels: torch.Tensor, value: torch.Tensor) -> Codes:
    """Levels of -1, 0 and +1 as codes.

    Args:
        levels: int8 [numel].
        value: fp32 [1], what a level of one stands for.
    """
    return Codes.from_codes((levels != 0).to(torch.uint8) * 2 + (levels > 0), codebook="ternary", bits=2, scales=value)


def level_dtype(world_size: int) -> torch.dtype:
    """An integer type that holds the sum of `world_size` levels, and that backends can add."""
    return torch.int8 if world_size <= 127 else torch.int32
