"""The residual added to the gradient: the one addition that every compressor pays for."""

from __future__ import annotations

import torch

from collectives.kernels.loop import Int, Loop, array

LARGE_NUMEL = 1 << 22
"""from here on a sum is written past the caches, which would not hold it until it is read"""

_FLOATS = array(torch.float32)
_ADD = Loop("add_past_cache", _FLOATS, _FLOATS, Int, _FLOATS)


def add(a: torch.Tensor, b: torch.Tensor, *, factor: float = 1.0, out: torch.Tensor) -> None:
    """`out = a + factor * b`.

    Args:
        a: floating [numel].
        b: fp32 [numel].
        factor: of `b`.
        out: fp32 [numel], overwritten; may be `b`.
    """
    is_plain = factor == 1.0 and a.dtype == torch.float32 and out.data_ptr() != b.data_ptr()
    if is_plain and a.numel() >= LARGE_NUMEL and a.is_contiguous() and _ADD.serves(a, b, out):
        _ADD(a, b, a.numel(), out)
    else:
        torch.add(a, b, alpha=factor, out=out)
