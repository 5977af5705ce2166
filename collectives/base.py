"""What a collective is: a way in which ranks sum payloads so that every rank ends with the same bits."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Self

from collectives.options import Options
from collectives.payload import Payload
from collectives.transport import ReduceOp, Transport

Key = tuple[int, ...]


@dataclasses.dataclass(kw_only=True)
class Collective(Options, abc.ABC):
    """One file, one class, named after the file; dataclass fields are its options.

    Use: `Ring().bind(transport).sum(payload, key=(0, 1))`. All ranks call with payloads of one kind and length, in the same order.
    """

    transport: ClassVar[Transport]  # set per instance by `bind`

    def bind(self, transport: Transport) -> Self:
        """Attach to the ranks that take part; returns itself. Every rank must call."""
        self.__dict__["transport"] = transport
        return self

    @classmethod
    @abc.abstractmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """Why payloads of this kind cannot ride on this collective; None where they can."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def broadcast(self, payload: Payload | None, src: int, key: Key) -> Payload:
        """`payload` of rank `src`, on every rank; the others pass None. Every rank must call."""

    @abc.abstractmethod
    def expected_bytes(self, nbytes: int, world_size: int, rank: int) -> float | None:
        """Bytes that `rank` sends to sum payloads of `nbytes` each; None where it depends on the data."""

    def close(self) -> None:  # noqa: B027 - most collectives hold nothing
        """Release what outlives a call (mapped memory, server threads). Every rank must call."""
