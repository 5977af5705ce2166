"""Which entries to send, by magnitude: exactly the same ones on every device, with or without native loops.

Of equal magnitudes the first wins; NaN counts as infinite. Positions ascend.
"""

from __future__ import annotations

import torch

from collectives.kernels.loop import Int, Loop, array

LONGEST_GROUP = 16384
"""entries of a group that the native loop takes"""

_FLOATS, _POSITIONS = array(torch.float32), array(torch.int64)
_SELECT_GROUPS = Loop("select_groups", _FLOATS, Int, Int, Int, Int, _POSITIONS)


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
    num_groups, rest = divmod(x.numel(), group_size)
    if group_size <= LONGEST_GROUP and _SELECT_GROUPS.serves(x):
        selected = torch.empty(num_groups * k + (k_last if rest else 0), dtype=torch.int64)
        _SELECT_GROUPS(x, x.numel(), group_size, k, k_last, selected)
        return selected
    whole = x.numel() - rest
    parts = [_top_of_rows(x[:whole].view(num_groups, group_size), k)] if num_groups else []
    if rest:
        parts.append(_top_of_rows(x[whole:].view(1, rest), k_last) + whole)
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=x.device)


def _top_of_rows(rows: torch.Tensor, k: int) -> torch.Tensor:
    """Flat positions of the k largest |entries| of every row of fp32 [num_rows, num_columns], ascending."""
    magnitudes = _magnitudes(rows)
    smallest = magnitudes.topk(k, dim=1).values[:, -1:]
    above, tied = magnitudes > smallest, magnitudes == smallest
    room = k - above.sum(dim=1, keepdim=True)
    return (above | (tied & (tied.cumsum(dim=1) <= room))).view(-1).nonzero().view(-1)


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Positions of the k largest |x|, ascending: int64 [k].

    Args:
        x: fp32 [numel], contiguous.
        k: 0 <= k <= numel.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=x.device)
    return _top_of_rows(x.view(1, -1), k)


def kth_largest(x: torch.Tensor, k: int) -> float:
    """The k-th largest |x|, 1 <= k <= numel, of fp32 [numel]."""
    return float(_magnitudes(x).topk(k).values[-1])


def reaching(x: torch.Tensor, level: float) -> torch.Tensor:
    """Positions of |x| >= level, ascending, int64.

    Args:
        x: fp32 [numel], contiguous.
        level: a number, rounded to fp32.
    """
    return (_magnitudes(x) >= level).nonzero().view(-1)


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    return x.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
