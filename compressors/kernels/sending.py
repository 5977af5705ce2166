"""What is sent from given positions, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.kernels.loop import Float, Int, Loop, array
from collectives.payloads.codec.values import to_value_dtype, value_limit

KINDS = (torch.float32, torch.float16, torch.bfloat16)

_FLOATS, _LONGS = array(torch.float32), array(torch.int64)
_SEND_AT = Loop(
    "send_at", _FLOATS, _FLOATS, Int, Int, _LONGS, Int, Int, Int, Float, array(*KINDS), _FLOATS, returns=Int
)


def send_at(
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor,
    left: torch.Tensor,
    positions: torch.Tensor,
    world_size: int,
    values: torch.Tensor,
) -> None:
    """Of x = gradients + residual the values at positions, in the type they travel in; the rest goes to `left`.

    Args:
        gradients: fp32 and contiguous; laid end to end they are [numel].
        residual: fp32 [numel].
        left: fp32 [numel], overwritten with x minus the values; shares no memory with the others.
        positions: int64 [count], strictly ascending within 0..numel-1.
        world_size: as in `to_value_dtype`.
        values: of `KINDS`, contiguous [count], overwritten.
    """
    dtype = values.dtype
    if _SEND_AT.serves(left, *gradients):
        kind, limit = KINDS.index(dtype), value_limit(dtype, world_size)
        start = following = 0
        for gradient in gradients:
            stop = start + gradient.numel()
            following = _SEND_AT(
                gradient, residual[start:stop], start, gradient.numel(), positions, following, positions.numel(),
                kind, limit, values, left[start:stop],
            )  # fmt: skip
            start = stop
        return
    torch.add(torch.cat(list(gradients)), residual, out=left)
    values.copy_(to_value_dtype(left.index_select(0, positions), dtype, world_size))
    left.scatter_add_(0, positions, values.float().neg())
