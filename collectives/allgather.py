"""All-gather: every rank sends its packed payload to all others, and each adds them. Supports all payloads.

All messages are sent at once, so it takes one latency, but its volume grows with the number of ranks. The result is a
list of terms in rank order. It includes this rank's own payload in encoded form, as the other ranks receive it, so that
all ranks add the same bits.

Bytes: (n-1) times the packed payload per rank.
"""

import dataclasses
from typing import ClassVar

from typing_extensions import override

from collectives.base import BoundCollective, Collective, PendingSum
from collectives.payloads.base import Payload, PayloadError
from collectives.payloads.bundle import UnreducedSum
from collectives.schedule.execution import PackedPieces
from collectives.schedule.rounds import Layout, Piece, Round
from collectives.transport.base import ReduceOp


class BoundAllgather(BoundCollective):
    """The collective `allgather`, ready to sum among the ranks of a transport."""

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        if op == "max":
            raise PayloadError("allgather cannot compute a maximum over ranks; use collective native or ring")
        pieces = PackedPieces(self.transport, payload, layout)
        (round_,) = self.rounds_of(layout)
        wait = pieces.post(round_)

        def finish() -> Payload:
            pieces.apply(round_, wait)
            return UnreducedSum(pieces.terms((0, layout.numel, 0)))

        return PendingSum(wait=wait, finish=finish)

    def gather(self, payload: Payload, layout: Layout) -> list[Payload]:
        """Return all ranks' payloads in rank order. Every rank must call this method.

        Args:
            payload: this rank's payload, at most as long as the layout allows.
            layout: sizes of the payloads, the same on all ranks; limits the length of the messages.
        """
        pieces = PackedPieces(self.transport, payload, layout)
        pieces.run(self.rounds_of(layout))
        return pieces.terms((0, layout.numel, 0))


@dataclasses.dataclass(kw_only=True)
class Allgather(Collective):
    """Send every rank's payload to all other ranks; the sum is the list of all payloads."""

    carries_wires: ClassVar[bool] = False
    leaves_terms: ClassVar[bool] = True
    bound = BoundAllgather
    finds_maxima = False

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        round_ = Round()
        for distance in range(1, world_size):  # each rank begins with a different peer, to spread the load
            to, source = (rank + distance) % world_size, (rank - distance) % world_size
            round_.send(to, Piece(0, layout.numel, frozenset([rank])))
            round_.receive(source, Piece(0, layout.numel, frozenset([source])), effect="collect")
        return [round_]

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        return (world_size - 1) * nbytes
