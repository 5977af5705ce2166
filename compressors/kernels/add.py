"""Sums of what a rank keeps from step to step, in one pass over memory."""

from __future__ import annotations

import torch

from collectives.kernels.gpu import also_on_gpus
from collectives.kernels.loop import Float, Int, Loop, array

_FLOATS = array(torch.float32)
_ADD_SCALED = Loop("add_scaled", _FLOATS, Float, _FLOATS, Int, _FLOATS)


@also_on_gpus
def add(a: torch.Tensor, b: torch.Tensor, *, factor: float = 1.0, out: torch.Tensor) -> None:
    """Write a + factor * b, the product rounded before it is added.

    Args:
        a: floating, 1-D.
        b: fp32, as long.
        factor: rounded to fp32.
        out: fp32, as long, overwritten; may be `a` or `b`.
    """
    if a.dtype == torch.float32 and a.is_contiguous() and _ADD_SCALED.serves(a, b):
        _ADD_SCALED(a, factor, b, len(out), out)
    else:
        torch.add(a, b if factor == 1 else b * factor, out=out)
