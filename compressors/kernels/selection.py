"""Which entries to send, by magnitude: exactly the same ones on every device, with or without native loops.

Of equal magnitudes the first wins; NaN counts as infinite. Positions ascend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from collectives.kernels.loop import (
    Float,
    FloatArray,
    Int,
    IntArray,
    LongArray,
    Longs,
    Loop,
    Parts,
    also_on_gpus,
    array,
)
from collectives.payloads.codec.values import to_value_dtype, value_limit
from compressors.kernels.magnitudes import magnitude_bits, magnitudes

LONGEST_GROUP = 16384
"""entries of a group that one pass takes"""
TYPES = (torch.float32, torch.float16, torch.bfloat16)
"""that values travel in, by the native loop's numbers"""
FEW, SPARE = 16, 4096
"""memory for one entry in so many, and for some more, is at hand before it is known how many there are"""

_SELECT_GROUPS = Loop("select_groups", FloatArray, Int, Int, Int, Int, LongArray)
_TOP_K = Loop("top_k", FloatArray, Int, Int, LongArray, Int, LongArray, IntArray)
_SEND_GROUPS = {
    dtype: Loop(
        "send_groups",
        Longs,
        Longs,
        *[FloatArray, Int, Int, Int, Int, Int, Float],
        array(dtype),
        LongArray,
        LongArray,
        FloatArray,
        returns=Int,
    )
    for dtype in TYPES
}
_COUNT_REACHING = Loop("count_reaching", FloatArray, Int, Int, returns=Int)
_FIND_REACHING = Loop("find_reaching", FloatArray, Int, Int, Int, LongArray, returns=Int)


def select_groups(x: torch.Tensor, group_size: int, k: int, k_last: int) -> torch.Tensor:
    """Positions of the k largest |x| in each group of `group_size` consecutive entries, ascending.

    Args:
        x: fp32 [numel], contiguous.
        group_size: entries per group; the last group may be shorter.
        k: kept per whole group, 1 <= k <= group_size.
        k_last: kept in the short last group.

    Returns:
        int64 [k * (numel // group_size) + k_last].
    """
    if group_size <= LONGEST_GROUP:
        return select_short_groups(x, group_size, k, k_last)
    parts = [top_k(group, k if len(group) == group_size else k_last) for group in x.split(group_size)]
    starts = range(0, x.numel(), group_size)
    return torch.cat([part + start for part, start in zip(parts, starts, strict=True)]) if parts else _none(x)


@also_on_gpus
def select_short_groups(x: torch.Tensor, group_size: int, k: int, k_last: int) -> torch.Tensor:
    """`select_groups` for groups of at most LONGEST_GROUP."""
    num_groups, rest = divmod(x.numel(), group_size)
    if _SELECT_GROUPS.serves(x):
        selected = torch.empty(num_groups * k + (k_last if rest else 0), dtype=torch.int64)
        _SELECT_GROUPS(x, x.numel(), group_size, k, k_last, selected)
        return selected
    whole = x.numel() - rest
    parts = [_top_of_rows(x[:whole].view(num_groups, group_size), k)] if num_groups else []
    if rest:
        parts.append(_top_of_rows(x[whole:].view(1, rest), k_last) + whole)
    return torch.cat(parts) if parts else _none(x)


def send_groups(
    gradients: Sequence[torch.Tensor],
    residual: torch.Tensor,
    left: torch.Tensor,
    groups: tuple[int, int, int],
    dtype: torch.dtype,
    world_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Of x = gradients + residual the k largest per group, in the type they travel in; the rest goes to `left`.

    Args:
        gradients: fp32 and contiguous; laid end to end they are [numel].
        residual: fp32 [numel].
        left: fp32 [numel], overwritten with x minus the values; shares no memory with the others.
        groups: group_size, k and k_last of `select_groups`.
        dtype: of `TYPES`.
        world_size: as in `to_value_dtype`.

    Returns:
        values [as `select_groups` gives positions], -0.0 as +0.0; for each its index in its group, int64; the
        positions; and whether all of x is finite: what is not is among the largest.
    """
    group_size, k, k_last = groups
    numel, loop = len(left), _SEND_GROUPS[dtype]
    if group_size <= LONGEST_GROUP and loop.serves(left):
        x = Parts(gradients)
        num_groups, rest = divmod(numel, group_size)
        num_sent = num_groups * k + (k_last if rest else 0)
        values = torch.empty(num_sent, dtype=dtype)
        indices, positions = (torch.empty(num_sent, dtype=torch.int64) for _ in range(2))
        is_finite = loop(
            x.starts, x.borders, residual, numel, *groups, TYPES.index(dtype), value_limit(dtype, world_size),
            values, indices, positions, left,
        )  # fmt: skip
        return values, indices, positions, bool(is_finite)
    torch.add(torch.cat(list(gradients)), residual, out=left)
    positions = select_groups(left, *groups)
    largest = left.index_select(0, positions)
    values = to_value_dtype(largest, dtype, world_size) + 0
    left.scatter_add_(0, positions, values.float().neg())
    return values, positions.remainder(group_size), positions, bool(largest.isfinite().all())


@also_on_gpus
def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest |x|, ascending: int64 [k].

    Args:
        x: fp32 [numel], contiguous.
        k: 0 <= k <= numel.
    """
    if k == 0:
        return _none(x)
    if _TOP_K.serves(x):
        selected = torch.empty(k, dtype=torch.int64)
        _TOP_K(x, x.numel(), k, selected, *candidates_room(x.numel(), k))
        return selected
    return _top_of_rows(x.view(1, -1), k)


def candidates_room(numel: int, k: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Memory for the loops of top-k: so many candidates at most, their positions, and what is there or in a sample."""
    most = min(numel, 2 * k + SPARE)
    return most, torch.empty(most, dtype=torch.int64), torch.empty(max(most, numel // 64), dtype=torch.int32)


def kth_largest(x: torch.Tensor, k: int) -> float:
    """The k-th largest |x|, 1 <= k <= numel, of fp32 [numel]."""
    return float(magnitudes(x.index_select(0, top_k(x, k))).amin())


@also_on_gpus
def count_reaching(x: torch.Tensor, level: float) -> int:
    """How many |x| >= level; as in `reaching`."""
    if _COUNT_REACHING.serves(x):
        return int(_COUNT_REACHING(x, x.numel(), magnitude_bits(level)))
    return int((magnitudes(x).view(torch.int32) >= magnitude_bits(level)).sum())


@also_on_gpus
def reaching(x: torch.Tensor, level: float) -> torch.Tensor:
    """Positions of |x| >= level, ascending, int64.

    Args:
        x: fp32 [numel], contiguous.
        level: rounded to fp32; NaN counts as infinite.
    """
    if _FIND_REACHING.serves(x):
        bound, room = magnitude_bits(level), x.numel() // FEW + SPARE
        positions = torch.empty(room, dtype=torch.int64)
        count = _FIND_REACHING(x, x.numel(), bound, room, positions)
        if count > room:
            positions = torch.empty(count, dtype=torch.int64)
            _FIND_REACHING(x, x.numel(), bound, count, positions)
        return positions[:count]
    return (magnitudes(x).view(torch.int32) >= magnitude_bits(level)).nonzero().view(-1)


def _top_of_rows(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Flat positions of the k largest |entries| of every row of fp32 [num_rows, num_columns], ascending."""
    sizes = magnitudes(rows)
    smallest = sizes.topk(k, dim=1).values[:, -1:]
    above, tied = sizes > smallest, sizes == smallest
    room = k - above.sum(dim=1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=1) <= room))).view(-1).nonzero().view(-1)


def _none(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.int64, device=x.device)
