"""Halving-doubling: partners swap halves, then quarters, ...; a ring's bytes in 2 log2(n) steps instead of 2(n-1).

Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), section
4.5. The payload is cut into p chunks, p the largest power of two up to n. Ranks beyond p first add theirs to rank r-p
and get the finished sum at the end. Then for d = p/2, p/4, ..., 1 rank r and rank r xor d split the chunks that they
still share, each summing its half; for d = 1, 2, ..., p/2 they swap what they hold. So every chunk is summed as the
same tree: S(r) = x_r + x_{r+p}, then S(r) <- S(r) + S(r xor d) for falling d.
Differs: chunks are a balanced partition; payloads that are not dense are merged at each step.

Bytes: dense, 2 (p-1)/p of the wire tensor where p divides it, once more on every rank that has a partner beyond p, and
once on that partner.
"""

from __future__ import annotations

import dataclasses

import torch

from collectives.base import ReducingCollective
from collectives.payloads.base import Payload, balanced_borders, unpack
from collectives.payloads.bundle import Bundle
from collectives.transport import messages
from collectives.transport.schedule import Step


@dataclasses.dataclass(kw_only=True)
class HalvingDoubling(ReducingCollective):
    """Partners at halving distances."""

    def _steps(self, wire: torch.Tensor) -> list[Step]:
        rank, n = self.transport.rank, self.transport.world_size
        p = power_below(n)
        first, last = Step(), Step()
        if rank >= p:
            first.send(wire, rank - p)
            last.replace(wire, rank - p)
            return [first, last]
        borders = balanced_borders(wire.numel(), p)
        if rank + p < n:
            first.add(wire, rank + p)
            last.send(wire, rank + p)
        halving: list[Step] = []
        doubling: list[Step] = []
        for distance in falling_powers(p):
            kept, given = _halves(rank, distance)
            mine, theirs = (wire[borders[start] : borders[stop]] for start, stop in (kept, given))
            step = Step()
            step.send(theirs, rank ^ distance)
            step.add(mine, rank ^ distance)
            halving.append(step)
            back = Step()
            back.send(mine, rank ^ distance)
            back.replace(theirs, rank ^ distance)
            doubling.insert(0, back)
        return [first, *halving, *doubling, last]

    def _merge(self, payload: Payload, layout: Payload) -> Payload:
        transport, rank = self.transport, self.transport.rank
        p = power_below(transport.world_size)
        bound = messages.bound_nbytes(layout)
        if rank >= p:
            transport.exchange([(messages.pack(payload, transport, bound), rank - p)], [])
            return unpack(transport.exchange([], [(bound, rank - p)])[0])
        borders = layout.borders(p)
        has_partner = rank + p < transport.world_size
        if has_partner:
            payload = payload.add(unpack(transport.exchange([], [(bound, rank + p)])[0]))
        origin = 0
        for distance in falling_powers(p):
            kept, given = ([borders[i] - origin for i in half] for half in _halves(rank, distance))
            packed = messages.pack(payload.slice(*given), transport, bound)
            (received,) = transport.exchange([(packed, rank ^ distance)], [(bound, rank ^ distance)])
            payload = payload.slice(*kept).add(unpack(received))
            origin += kept[0]
        packed = messages.pack(payload, transport, bound)
        for distance in reversed(falling_powers(p)):
            (received,) = transport.exchange([(packed, rank ^ distance)], [(bound, rank ^ distance)])
            both = [unpack(packed), unpack(received)]
            payload = Bundle(both[::-1] if rank & distance else both)
            packed = messages.pack(payload, transport, bound)
        if has_partner:
            transport.exchange([(packed, rank + p)], [])
        return unpack(packed)

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """All chunks but the own one halving, the growing own range doubling; the whole to or from a rank beyond p."""
        p = power_below(world_size)
        if world_size == 1:
            return 0
        if not elementwise:
            return None
        if rank >= p:
            return nbytes
        borders = [itemsize * border for border in balanced_borders(nbytes // itemsize, p)]
        total = nbytes if rank + p < world_size else 0
        for distance in falling_powers(p):
            for start, stop in _halves(rank, distance):
                total += borders[stop] - borders[start]
        return total


def power_below(n: int) -> int:
    """The largest power of two that does not exceed n."""
    return 1 << (n.bit_length() - 1)


def falling_powers(p: int) -> list[int]:
    """p/2, p/4, ..., 1."""
    return [1 << bit for bit in reversed(range(p.bit_length() - 1))]


def _halves(rank: int, distance: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(first chunk, end) that rank keeps and that it gives away when it halves with rank xor distance."""
    keeps = rank // distance * distance
    gives = (rank ^ distance) // distance * distance
    return (keeps, keeps + distance), (gives, gives + distance)
