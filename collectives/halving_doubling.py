"""Halving-doubling: all-reduce between partners that swap halves, quarters, ..., in 2 log2(n) steps.

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section
4.5. The payload is cut into p chunks, where p is the largest power of two up to n. Each rank r from p on first sends
its payload to rank r-p, and gets the finished sum from it at the end. Then, for d = p/2, p/4, ..., 1, rank r and rank
r xor d divide the chunks that they still share, and each sums its half; for d = 1, 2, ..., p/2 they swap the chunks
that they hold. So every chunk is summed by the same tree: S(r) = x_r + x_{r+p}, then S(r) <- S(r) + S(r xor d) for
falling d. It sends as many bytes as a ring, which needs 2 (n-1) steps.
Differs: chunks are a balanced partition; payloads that are not dense are merged at each step.

Bytes: dense, 2 (p-1)/p of the wire tensor if p divides it; once the wire tensor more on a rank r with a partner r+p,
and only once the wire tensor on that partner.
"""

import dataclasses

from typing_extensions import override

from collectives.base import Collective
from collectives.schedule.layout import Layout, Stretch
from collectives.schedule.rounds import Piece, Round


@dataclasses.dataclass(kw_only=True)
class HalvingDoubling(Collective):
    """Sum between partners whose distance in rank is halved at each step."""

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        p = 1 << (world_size.bit_length() - 1)  # the largest power of two up to world_size
        everyone = frozenset(range(world_size))
        chunks = layout.chunks(p)
        whole = chunks[0][0], chunks[-1][1]
        finished = [Piece(*chunk, everyone) for chunk in chunks]

        def partial_sum(owner: int, half: slice, distance: int) -> Piece:
            # what `owner` holds before it halves at this distance
            ranks = frozenset(range(owner % (2 * distance), world_size, 2 * distance))
            return Piece(chunks[half][0][0], chunks[half][-1][1], ranks)

        first, last = Round(layout.itemsize), Round(layout.itemsize)
        if rank >= p:
            first.send(rank - p, Piece(*whole, frozenset([rank])))
            last.receive(rank - p, *finished)
            return [first, last]
        if rank + p < world_size:
            first.receive(rank + p, Piece(*whole, frozenset([rank + p])), effect="own + received")
            last.send(rank + p, *finished)
        halving: list[Round] = []
        doubling: list[Round] = []
        for distance in (p >> bit for bit in range(1, p.bit_length())):  # p/2, p/4, ..., 1
            partner = rank ^ distance
            kept, given = _half(rank, distance), _half(partner, distance)
            halve = Round(layout.itemsize)
            halve.send(partner, partial_sum(rank, given, distance))
            halve.receive(partner, partial_sum(partner, kept, distance), effect="own + received")
            halving.append(halve)
            back = Round(layout.itemsize)
            back.send(partner, *finished[kept])
            back.receive(partner, *finished[given])
            doubling.insert(0, back)
        return [first, *halving, *doubling, last]

    @override
    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        return layout.chunks(1 << (world_size.bit_length() - 1))


def _half(rank: int, distance: int) -> slice:  # the chunks that a rank keeps when it halves with rank xor distance
    first = rank // distance * distance
    return slice(first, first + distance)
