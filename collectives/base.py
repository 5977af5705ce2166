"""What a collective is: a way in which ranks sum payloads so that every rank ends with the same bits."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Self

from collectives import messages
from collectives.options import Options
from collectives.payload import Payload, PayloadError, unpack
from collectives.steps import Scratch
from collectives.transport import ReduceOp, Transport

Key = tuple[int, ...]


@dataclasses.dataclass(kw_only=True)
class Collective(Options, abc.ABC):
    """One file, one class, named after the file; dataclass fields are its options.

    Use: `Ring().bind(transport).sum(payload, key=(0, 1))`. All ranks call with payloads of one kind and length, in the
    same order.
    """

    transport: ClassVar[Transport]  # set per instance by `bind`, as is the next
    scratch: ClassVar[Scratch]

    def bind(self, transport: Transport) -> Self:
        """Attach to the ranks that take part; returns itself. Every rank must call.

        Raises:
            OptionError: the options do not fit this number of ranks.
        """
        self.__dict__.update(transport=transport, scratch=Scratch())
        return self

    @classmethod
    @abc.abstractmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """Why payloads of this kind cannot ride on this collective and what would work; None where they can."""

    def sum(self, payload: Payload, key: Key, op: ReduceOp = "sum") -> Payload:
        """The sum (or maximum) over ranks, the same bits on every rank; every rank must call.

        Args:
            payload: this rank's contribution; its tensors may be overwritten.
            key: ids of the layers inside; names messages, shards and server state.
            op: "max" for elementwise payloads only.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
            PayloadError: this kind cannot ride here.
        """
        for leaf in messages.leaves(payload):
            if reason := self.refuses(type(leaf)):
                raise PayloadError(reason)
            if op == "max" and not leaf.elementwise:
                raise PayloadError(
                    f"a maximum over ranks needs element-wise payloads, and {type(leaf).__name__} is none"
                )
        if self.transport.world_size == 1:
            return payload
        return self._sum(payload, key, op)

    @abc.abstractmethod
    def _sum(self, payload: Payload, key: Key, op: ReduceOp) -> Payload:
        """`sum` for two ranks or more and payloads that may ride here."""

    def broadcast(self, payload: Payload | None, src: int, key: Key) -> Payload:
        """`payload` of rank `src`, on every rank; the others pass None. Every rank must call.

        Down a binomial tree: rank `src` sends to ceil(log2 n) others, all ranks together n-1 times the packed payload.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        packed = None if payload is None else messages.pack(payload, self.transport)
        return unpack(messages.spread(self.transport, packed, src))

    def carried_bytes(self, payload: Payload) -> int:
        """Bytes of one payload as it travels here: packed, or the bare wire tensor where all know length and type."""
        return payload.wire.nbytes if payload.elementwise else payload.nbytes

    @abc.abstractmethod
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """Bytes that `rank` sends in one `sum`, as a closed form; None where it depends on the data.

        Args:
            nbytes: of one rank's payload, as `carried_bytes` tells.
            world_size: number of ranks.
            rank: which one.
            elementwise: whether the payload is; others may be merged on their way and then change their size.
            itemsize: bytes of one element of an elementwise payload, below which nothing is cut.
        """

    def close(self) -> None:
        """Release what outlives a call (mapped memory, server threads). Every rank must call."""
