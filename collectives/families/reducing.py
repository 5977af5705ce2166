"""Collectives that add on the way: they describe their rounds, and what is here carries them out.

Element-wise payloads travel as bare wire tensors and are added in place; others travel packed and are merged.
"""

from __future__ import annotations

import abc
import dataclasses

from typing_extensions import override

from collectives.base import BoundCollective, Collective, Downlink
from collectives.payloads.base import Payload
from collectives.rounds.base import Round
from collectives.rounds.in_place import Scratch, run_in_place
from collectives.rounds.layout import Layout
from collectives.rounds.packed import PackedPieces
from collectives.transport.base import ReduceOp, Transport


@dataclasses.dataclass(kw_only=True)
class ReducingCollective(Collective):
    """One method says it all: `rounds`."""

    @override
    def bind(self, transport: Transport, downlink: Downlink | None = None) -> BoundCollective:
        return _BoundReducing(self, transport)

    @override
    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        if kind.elementwise or kind.addable:
            return None
        return (
            f"{cls.component_name} adds payloads on their way, which {kind.__name__} does not allow; "
            "use collective allgather or server"
        )

    @override
    @abc.abstractmethod
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]: ...

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        if world_size == 1:
            return 0
        if not elementwise:
            return None
        rounds = self.rounds(world_size, rank, Layout.dense(nbytes // itemsize, itemsize))
        return sum(round_.nbytes(message) for round_ in rounds for message in round_.sends)


class _BoundReducing(BoundCollective):
    def __init__(self, options: ReducingCollective, transport: Transport) -> None:
        super().__init__(options, transport)
        self._reducing = options
        self._scratch = Scratch()
        self._rounds: dict[Layout, list[Round]] = {}  # buckets come again at every step

    @override
    def sum_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> Payload:
        if layout not in self._rounds:
            n, rank = self.transport.world_size, self.transport.rank
            self._rounds[layout] = self._reducing.rounds(n, rank, layout)
        rounds = self._rounds[layout]
        if layout.itemsize is None:
            pieces = PackedPieces(self.transport, payload, layout)
            pieces.run(rounds)
            return pieces.total()
        wire = payload.wire
        run_in_place(self.transport, wire, rounds, op, self._scratch)
        return payload.with_wire(wire)
