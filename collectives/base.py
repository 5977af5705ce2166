"""What a collective is: a way in which ranks sum payloads so that every rank ends with the same bits."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch

from collectives.options import Options
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.bundle import Bundle
from collectives.transport import messages
from collectives.transport.base import ReduceOp, Transport
from collectives.transport.schedule import Scratch, Step, run

Key = tuple[int, ...]


@dataclasses.dataclass(kw_only=True)
class Collective(Options, abc.ABC):
    """One file, one class, named after the file; dataclass fields are its options.

    Use: `Ring().bind(transport).sum(payload, key=(0, 1))`. All ranks call with payloads of one kind and length, in the
    same order.

    Class facts:
        carries_wires: element-wise payloads travel as bare wire tensors, whose length and type all ranks know.
    """

    carries_wires: ClassVar[bool] = True
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

    def refusal(self, kind: type[Payload]) -> str | None:
        """`refuses` under these very options: stricter where a collective is made of others."""
        return self.refuses(kind)

    def ranks_refusal(self, world_size: int) -> str | None:
        """Why these options are impossible with so many ranks and what would work; None where they are possible."""
        return None

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
            if reason := self.refusal(type(leaf)):
                raise PayloadError(reason)
            if op == "max" and not leaf.elementwise:
                raise PayloadError(
                    f"a maximum over ranks needs element-wise payloads, and {type(leaf).__name__} is not one"
                )
        if self.transport.world_size == 1:
            return payload
        if (
            self.carries_wires
            and not payload.elementwise
            and all(leaf.elementwise for leaf in messages.leaves(payload))
        ):
            return self._sum_by_type(messages.leaves(payload), key, op)
        return self.sum_like(payload, key, op, layout=payload)

    @abc.abstractmethod
    def sum_like(self, payload: Payload, key: Key, op: ReduceOp, *, layout: Payload) -> Payload:
        """`sum` for two ranks or more and payloads that may ride here.

        Args:
            payload: this rank's contribution, which may be of another kind on every rank (sums of unequally many).
            key: ids of the layers inside.
            op: "max" for elementwise payloads only.
            layout: a payload that has one kind on all ranks; says where to cut and how long messages can be.
        """

    def _sum_by_type(self, leaves: Sequence[Payload], key: Key, op: ReduceOp) -> Payload:
        """Element-wise payloads of several types: those of one type travel together."""
        by_type: dict[torch.dtype, list[int]] = {}
        for index, leaf in enumerate(leaves):
            by_type.setdefault(leaf.wire.dtype, []).append(index)
        totals = list(leaves)
        for indices in by_type.values():
            total = self.sum(Bundle([leaves[index] for index in indices]), key, op)
            for index, leaf in zip(indices, messages.leaves(total), strict=True):
                totals[index] = leaf
        return Bundle(totals)

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
        if self.carries_wires and all(leaf.elementwise for leaf in messages.leaves(payload)):
            return sum(leaf.wire.nbytes for leaf in messages.leaves(payload))
        return payload.nbytes

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

    def commit(self) -> None:
        """Accept state proposed since the last `commit` or `drop` (a server's residuals); with the compressor's."""

    def drop(self) -> None:
        """Forget the proposed state: the step is left out."""

    def state_dict(self) -> dict[str, Any]:
        """State of this rank that outlives a step; empty for most collectives."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""

    def close(self) -> None:
        """Release what outlives a call (mapped memory, server threads). Every rank must call."""


@dataclasses.dataclass(kw_only=True)
class ReducingCollective(Collective):
    """A collective that adds on the way: dense wire tensors in place by a list of steps, other payloads by merging."""

    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """What cannot be added on its way."""
        if kind.elementwise or kind.addable:
            return None
        return (
            f"{cls.component_name} adds payloads on their way, which {kind.__name__} does not allow; "
            "use collective allgather or server"
        )

    def sum_like(self, payload: Payload, key: Key, op: ReduceOp, *, layout: Payload) -> Payload:
        """As the base class says."""
        if not layout.elementwise:
            return self._merge(payload, layout)
        wire = payload.wire
        run(self.transport, wire, self._steps(wire), op, self.scratch)
        return payload.with_wire(wire)

    @abc.abstractmethod
    def _steps(self, wire: torch.Tensor) -> list[Step]:
        """What this rank does to sum `wire` over all ranks in place; the lists of all ranks mirror each other."""

    @abc.abstractmethod
    def _merge(self, payload: Payload, layout: Payload) -> Payload:
        """The sum of payloads that are not element-wise, cut as `layout` can be."""
