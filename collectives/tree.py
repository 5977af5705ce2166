"""Tree: all-reduce up a binary tree to rank 0 and down again, pipelined in segments.

Source: the pipelined binary tree of Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009), with one tree. Rank r has the children 2r+1 and 2r+2, and sums S(r) = (x_r + S(2r+1)) +
S(2r+2).
Differs: segments move in lock step (each moves one level at each step), so the schedule is the same on every backend;
payloads that are not dense travel whole, are merged on their way up, and are passed on without being unpacked on their
way down.

Bytes: dense, the wire tensor once upwards (except on rank 0) and once downwards per child: at most 3 times per rank,
2 (n-1)/n times on average. Latency 2 log2(n).
"""

import dataclasses
from typing import Annotated

from typing_extensions import Doc, override

from collectives.base import Collective
from collectives.options import Count
from collectives.schedule.layout import Layout, Stretch
from collectives.schedule.rounds import Piece, Round


@dataclasses.dataclass(kw_only=True)
class Tree(Collective):
    """Sum along a binary tree with rank 0 as its root."""

    segment_bytes: Annotated[Count, Doc("bytes of a dense payload that travel as one message")] = 4_000_000

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        depth, height = ((place + 1).bit_length() - 1 for place in (rank, world_size - 1))  # steps to the root
        segments, children = self.segments(layout), _children_of(rank, world_size)
        parent, below, everyone = (rank - 1) // 2, _ranks_below(rank, world_size), frozenset(range(world_size))
        rounds = []
        for time in range(len(segments) + 2 * height - 1):
            round_ = Round(layout.itemsize)
            for child in children:
                if 0 <= (up := time - (height - depth - 1)) < len(segments):
                    summed = Piece(*segments[up], _ranks_below(child, world_size))
                    round_.receive(child, summed, effect="own + received")
                if 0 <= (down := time - (height + depth)) < len(segments):
                    round_.send(child, Piece(*segments[down], everyone))
            if rank:
                if 0 <= (up := time - (height - depth)) < len(segments):
                    round_.send(parent, Piece(*segments[up], below))
                if 0 <= (down := time - (height + depth - 1)) < len(segments):
                    round_.receive(parent, Piece(*segments[down], everyone))
            rounds.append(round_)
        return rounds

    def segments(self, layout: Layout) -> list[Stretch]:
        """Return the segments into which an element-wise payload is divided; others are sent whole, as one segment."""
        (whole,) = layout.chunks(1)
        nbytes = 0 if layout.itemsize is None else layout.itemsize * whole[1]
        return layout.chunks(max(1, -(-nbytes // self.segment_bytes)))


def _ranks_below(rank: int, n: int) -> frozenset[int]:
    return frozenset([rank]).union(*(_ranks_below(child, n) for child in _children_of(rank, n)))


def _children_of(rank: int, n: int) -> list[int]:
    return [child for child in (2 * rank + 1, 2 * rank + 2) if child < n]
