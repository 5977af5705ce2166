"""Sums of what a rank keeps from step to step, in one pass over memory."""

from __future__ import annotations

import torch

from collectives.kernels.loop import Float, FloatArray, Int, Loop, also_on_gpus

_ADD_SCALED = Loop("add_scaled", FloatArray, Float, FloatArray, Int, FloatArray)
_ACCELERATE = Loop("accelerate", FloatArray, FloatArray, FloatArray, Float, Int, Int, FloatArray, FloatArray)


@also_on_gpus
def add(a: torch.Tensor, b: torch.Tensor, *, factor: float = 1.0, out: torch.Tensor) -> None:
    """Write a + factor * b, the product rounded before it is added.

    Args:
        a: floating, 1-D.
        b: fp32, as long.
        factor: rounded to fp32.
        out: fp32, as long, overwritten; may be `a` or `b`.
    """
    if _is_plain(a) and _ADD_SCALED.serves(a, b):
        _ADD_SCALED(a, factor, b, len(out), out)
    else:
        torch.add(a, b if factor == 1 else b * factor, out=out)


def accelerate(
    gradient: torch.Tensor,
    velocity: torch.Tensor | None,
    residual: torch.Tensor | None,
    momentum: float,
    *,
    nesterov: bool,
    now: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the velocity's next value m u + g to `now`, and what is to be sent of it, now + residual, to `out`.

    With nesterov the velocity is m (u + g), and what is to be sent has the gradient once more.

    Args:
        gradient: floating, 1-D.
        velocity: u, fp32, as long; None for zeros.
        residual: fp32, as long; None for zeros.
        momentum: m, rounded to fp32.
        nesterov: as above.
        now: fp32, as long, overwritten; may share no memory with the others.
        out: likewise.
    """
    is_first = velocity is None or residual is None
    if not is_first and _is_plain(gradient) and _ACCELERATE.serves(gradient, now, out):
        _ACCELERATE(gradient, velocity, residual, momentum, nesterov, len(out), now, out)
        return
    if velocity is None:
        now.copy_(gradient)
    else:
        add(gradient, velocity, factor=1.0 if nesterov else momentum, out=now)
    if nesterov:
        now.mul_(momentum)
    if residual is None:
        out.copy_(now)
    else:
        add(now, residual, out=out)
    if nesterov:
        add(gradient, out, out=out)


def _is_plain(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()
