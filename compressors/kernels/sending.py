"""What is sent from certain positions, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.kernels.loop import Float, FloatArray, Int, LongArray, Loop, array
from collectives.payloads.codec.index_sets import check_numel, has_marks, marks_for, seeded_positions
from collectives.payloads.codec.values import to_value_dtype, value_limit

KINDS = (torch.float32, torch.float16, torch.bfloat16)

_SEND_AT = Loop(
    "send_at", FloatArray, FloatArray, Int, Int, LongArray, Int, Int, Int, Float, array(*KINDS), FloatArray, returns=Int
)
_SEND_DRAWN = Loop(
    "send_drawn", FloatArray, FloatArray, Int, Int, Int, LongArray, LongArray, Int, Float, array(*KINDS), FloatArray
)


def send_drawn(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    left: torch.Tensor,
    seed: int,
    world_size: int,
    values: torch.Tensor,
) -> torch.Tensor:
    """`send_at` as many positions as there is room for values, drawn as `seeded_positions` does: these, int64 [count].

    Args:
        gradient: fp32 [numel] and contiguous.
        residual: as there.
        left: as there.
        seed: of the positions.
        world_size: as there.
        values: likewise.
    """
    numel, count = gradient.numel(), values.numel()
    check_numel(numel)
    if not (_SEND_DRAWN.serves(gradient) and has_marks(numel, count)):
        positions = seeded_positions(numel, count, seed).to(gradient.device)
        send_at([gradient], residual, left, positions, world_size, values)
        return positions
    positions, dtype = torch.empty(count, dtype=torch.int64), values.dtype
    kind, limit = KINDS.index(dtype), value_limit(dtype, world_size)
    _SEND_DRAWN(
        gradient, residual, numel, count, seed, marks_for(numel), positions, kind, limit, values, left
    )  # fmt: skip
    return positions


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
