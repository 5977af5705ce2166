"""WireLost: what rounding takes off the sums of a wire tensor, for the payloads that lie on the wire."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from collectives.payloads.base import Payload
from collectives.payloads.sparse import IndexedValues
from collectives.rounds.layout import leaves

WireLost = Callable[[int, torch.Tensor], None]
"""(first element on the wire, what rounding took off the sums from there on, fp32)"""


def lost_on_wire(payload: Payload) -> WireLost | None:
    """Return what hands losses on by element of an element-wise payload; None where its sender keeps none."""
    if (keep_lost := payload.keep_lost) is None:
        return None
    members = leaves(payload)
    starts = [0, *itertools.accumulate(member.wire.numel() for member in members)]
    offsets = itertools.accumulate((member.numel for member in members), initial=0)
    placed = list(zip(members, offsets, itertools.pairwise(starts), strict=False))

    def lost(start: int, values: torch.Tensor) -> None:
        for member, offset, (first, last) in placed:
            begin, end = max(start, first), min(start + values.numel(), last)
            if begin >= end:
                continue
            part = values[begin - start : end - start]
            if isinstance(member, IndexedValues):
                keep_lost(offset, part, member.positions[begin - first : end - first])
            else:
                keep_lost(offset + begin - first, part)

    return lost
