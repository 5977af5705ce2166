"""All-gather: every rank sends its packed payload to every other one, and each adds what it got; takes every kind.

All messages are under way at once, so it costs one latency; its volume grows with the number of ranks. The sum is left
as terms in rank order, own payload included as the others see it, so that all ranks add the same bits.

Bytes: (n-1) times the packed payload per rank.
"""

from __future__ import annotations

import dataclasses

from collectives.base import Collective, Key
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.unreduced_sum import UnreducedSum
from collectives.transport import messages
from collectives.transport.base import ReduceOp


@dataclasses.dataclass(kw_only=True)
class Allgather(Collective):
    """Everybody's payload on every rank."""

    carries_wires = False

    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """Nothing."""
        return None

    def sum_like(self, payload: Payload, key: Key, op: ReduceOp, *, layout: Payload) -> Payload:
        """As the base class says."""
        if op == "max":
            raise PayloadError("allgather leaves a sum of terms, which has no maximum; use collective native or ring")
        return UnreducedSum(self.gather(payload, messages.bound_nbytes(layout)))

    def gather(self, payload: Payload, bound: int) -> list[Payload]:
        """Every rank's payload, none of them longer than `bound` bytes, in rank order; every rank must call."""
        transport = self.transport
        packed = messages.pack(payload, transport, bound)
        others = [rank for rank in range(transport.world_size) if rank != transport.rank]
        buffers = transport.exchange([(packed, rank) for rank in others], [(bound, rank) for rank in others])
        payloads = [unpack(buffer) for buffer in buffers]
        payloads.insert(transport.rank, payload)  # unpacking one's own would give the same bits
        return payloads

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """(n-1) times the packed payload."""
        return (world_size - 1) * nbytes
