"""All ranks send to rank 0, which adds the payloads and sends the sum back."""

from __future__ import annotations

import dataclasses

from collectives.base import Collective
from collectives.schedule.rounds import Layout, Piece, Round


@dataclasses.dataclass(kw_only=True)
class Star(Collective):
    """Rank 0 adds in the order of the ranks."""

    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        """Return one round up and one down."""
        (whole,) = layout.chunks(1)
        up, down = Round(layout.itemsize), Round(layout.itemsize)
        total = Piece(*whole, frozenset(range(world_size)))
        if rank:
            up.send(0, Piece(*whole, frozenset([rank])))
            down.receive(0, total)
        for other in range(1, world_size) if rank == 0 else ():
            up.receive(other, Piece(*whole, frozenset([other])), effect="own + received")
            down.send(other, total)
        return [up, down]
