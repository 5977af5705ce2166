"""Tree: sums travel up a binary tree to rank 0 and come down again, in segments that follow each other.

Source: the pipelined binary tree of Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009), with one tree. Rank r has the children 2r+1 and 2r+2, and sums S(r) = (x_r + S(2r+1)) +
S(2r+2). Differs: segments move in lock step (a segment is one level further at each step), so the schedule is the same
on every backend; payloads that are not dense travel whole, are merged on their way up and passed on unopened on their
way down.

Bytes: dense, the wire tensor once upwards (not rank 0) and once downwards per child: at most 3 times, 2 (n-1)/n on
average. Latency 2 log2(n).
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Annotated

import torch
from annotated_types import Ge
from typing_extensions import Doc

from collectives.base import ReducingCollective
from collectives.payloads.base import Payload, balanced_borders, unpack
from collectives.transport import messages
from collectives.transport.schedule import Step


@dataclasses.dataclass(kw_only=True)
class Tree(ReducingCollective):
    """A binary tree with rank 0 as its root."""

    segment_bytes: Annotated[int, Ge(1), Doc("bytes of a dense payload that travel as one message")] = 4_000_000

    def _steps(self, wire: torch.Tensor) -> list[Step]:
        rank, n = self.transport.rank, self.transport.world_size
        depth, height, children = depth_of(rank), depth_of(n - 1), children_of(rank, n)
        num_segments = max(1, -(-wire.nbytes // self.segment_bytes))
        borders = balanced_borders(wire.numel(), num_segments)
        segments = [wire[start:stop] for start, stop in itertools.pairwise(borders)]
        steps = []
        for time in range(num_segments + 2 * height - 1):
            step = Step()
            for child in children:
                if 0 <= (up := time - (height - depth - 1)) < num_segments:
                    step.add(segments[up], child)
                if 0 <= (down := time - (height + depth)) < num_segments:
                    step.send(segments[down], child)
            if rank:
                if 0 <= (up := time - (height - depth)) < num_segments:
                    step.send(segments[up], (rank - 1) // 2)
                if 0 <= (down := time - (height + depth - 1)) < num_segments:
                    step.replace(segments[down], (rank - 1) // 2)
            steps.append(step)
        return steps

    def _merge(self, payload: Payload, layout: Payload) -> Payload:
        transport, rank = self.transport, self.transport.rank
        children, parent = children_of(rank, transport.world_size), (rank - 1) // 2
        bound = messages.bound_nbytes(layout)
        for received in transport.exchange([], [(bound, child) for child in children]):
            payload = payload.add(unpack(received))
        packed = messages.pack(payload, transport, bound)
        if rank:
            transport.exchange([(packed, parent)], [])
            (packed,) = transport.exchange([], [(bound, parent)])
        total = unpack(packed)
        transport.exchange([(packed[: total.nbytes], child) for child in children], [])
        return total

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """The wire tensor once up and once down per child."""
        if world_size > 1 and not elementwise:
            return None
        return nbytes * ((rank > 0) + len(children_of(rank, world_size)))


def children_of(rank: int, n: int) -> list[int]:
    """The ranks below."""
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < n]


def depth_of(rank: int) -> int:
    """Steps to the root."""
    return (rank + 1).bit_length() - 1
