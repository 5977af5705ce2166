"""Ring: all-reduce between neighbours on a ring, by reduce-scatter and all-gather, in 2 (n-1) steps.

Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). The payload is
cut into n chunks. At step s of the reduce-scatter rank r sends chunk r-s to rank r+1 and adds what comes to its chunk
r-s-1 (indices modulo n); at step s of the all-gather it passes on chunk r+1-s and replaces chunk r-s. So chunk c is
summed as ((x_c + x_{c+1}) + x_{c+2}) + ... + x_{c+n-1} and is complete on rank c-1.
Differs: chunks are a balanced partition (no padding to a multiple of n); payloads that are not dense travel as chunks
that are merged at each hop, so their union grows, and finished chunks are passed on without being unpacked.

Bytes: dense, 2 (n-1)/n of the wire tensor if n divides it, in 2 (n-1) messages per rank: every chunk is sent twice,
except two that are sent once. Payloads that are merged: the packed unions with their headers.
"""

import dataclasses

from typing_extensions import override

from collectives.base import Collective
from collectives.schedule.layout import Layout, Stretch
from collectives.schedule.rounds import Piece, ReceiveEffect, Round


@dataclasses.dataclass(kw_only=True)
class Ring(Collective):
    """Sum by passing chunks of the payload around a ring of ranks."""

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        n = world_size
        chunks = layout.chunks(n)

        def partial_sum(chunk: int, num_terms: int) -> Piece:
            # the contributions of `num_terms` ranks, from the rank of the chunk's own number on
            return Piece(*chunks[chunk % n], frozenset((chunk + hop) % n for hop in range(min(num_terms, n))))

        rounds = []
        for index in range(2 * (n - 1)):
            round_ = Round(layout.itemsize)
            round_.send((rank + 1) % n, partial_sum(rank - index, index + 1))
            effect: ReceiveEffect = "received + own" if index < n - 1 else "replace"
            round_.receive((rank - 1) % n, partial_sum(rank - index - 1, index + 1), effect=effect)
            rounds.append(round_)
        return rounds

    @override
    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        return layout.chunks(world_size)
