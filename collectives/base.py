"""What a collective is: a way in which ranks sum payloads so that every rank ends with the same bits.

A `Collective` is what a user chooses, its options; a `BoundCollective` is one at work among the ranks of a transport.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol, Self

import torch

from collectives.options import Options
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.bundle import Bundle
from collectives.schedule.execution import PackedPieces, Scratch, lost_on_wire, run_in_place
from collectives.schedule.layout import Key, Layout, Stretch, leaves
from collectives.schedule.rounds import Round
from collectives.schedule.waves import Ints, Lengths, Wave, of_rounds, weights_of
from collectives.transport import messages
from collectives.transport.base import ReduceOp, Transport

__all__ = ["BoundCollective", "Collective", "Downlink", "Key", "PendingSum"]


class Downlink(Protocol):
    """What a server knows of the layers, and how it encodes an answer for them."""

    def numel(self, layer_id: int) -> int:
        """Elements of a layer."""

    def encode(self, total: torch.Tensor, layers: tuple[int, ...]) -> Payload:
        """What to answer.

        Args:
            total: the sum, fp32 [numel of all layers].
            layers: their ids, in the order in which they lie in `total`.
        """

    def commit(self) -> None:
        """Accept state proposed since the last `commit` or `drop`."""

    def drop(self) -> None:
        """Forget the proposed state."""

    def state_dict(self) -> dict[str, Any]:
        """State that outlives a step."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""


@dataclasses.dataclass(kw_only=True)
class Collective(Options, abc.ABC):
    """One file, one class, named after the file; dataclass fields are its options, which nothing changes.

    Use: `Ring().bind(transport).sum(payload, key=(0, 1))`. One that adds payloads on their way only describes its
    `rounds`; others also say what they take, what they send and how they sum.

    Class facts:
        carries_wires: element-wise payloads travel as bare wire tensors, whose length and type all ranks know.
        leaves_terms: what is not element-wise comes back as terms that are not added yet.
        decodes: what is not element-wise comes back decoded or encoded anew, and not as the sum of its kind.
    """

    carries_wires: ClassVar[bool] = True
    leaves_terms: ClassVar[bool] = False
    decodes: ClassVar[bool] = False

    @property
    def finds_maxima(self) -> bool:
        """Whether it gives a dense tensor's maximum over ranks as well as its sum."""
        return True

    @property
    def recodes(self) -> bool:
        """Whether sums that are not element-wise come back encoded anew by the run's compressor."""
        return False

    @property
    def keeps_residuals(self) -> bool:
        """Whether what answers lose is added to the next sums, for which the layers of a training run must be known."""
        return False

    def bind(self, transport: Transport, downlink: Downlink | None = None) -> BoundCollective:
        """Return a new one at work among the ranks of a transport; every rank must call.

        Args:
            transport: the ranks.
            downlink: for a server.

        Raises:
            OptionError: the options do not fit this number of ranks.
        """
        return BoundCollective(self, transport)

    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """Return why payloads of this kind cannot ride here and what would work; None where they can."""
        if kind.elementwise or kind.addable:
            return None
        return (
            f"{cls.component_name} adds payloads on their way, which {kind.__name__} does not allow; "
            "use collective allgather or server"
        )

    def refusal(self, kind: type[Payload]) -> str | None:
        """`refuses` under these very options: stricter where a collective is made of others."""
        return self.refuses(kind)

    def ranks_refusal(self, world_size: int) -> str | None:
        """Why these options are impossible with so many ranks and what would work; None where they are possible."""
        return None

    @abc.abstractmethod
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round] | None:
        """Return what `rank` sends and receives in one sum; None where a backend or shared memory moves the payloads.

        Args:
            world_size: number of ranks, two or more.
            rank: which one.
            layout: of all ranks' payloads; those of several types travel one type after the other (`Layout.by_type`).
        """

    def waves(
        self, world_size: int, layout: Layout, lengths: Lengths, weights: Ints | None = None
    ) -> Iterable[Wave] | None:
        """Return what all ranks send in one sum, wave by wave; None where `rounds` are.

        From the rounds of every rank, unless a collective says it for thousands of ranks at once.

        Args:
            world_size: as in `rounds`.
            layout: likewise.
            lengths: of the messages.
            weights: int [world_size], of how many ranks each brings the contributions; one each where None.
        """
        by_rank = [self.rounds(world_size, rank, layout) for rank in range(world_size)]
        if any(rounds is None for rounds in by_rank):
            return None
        weights = weights_of(world_size) if weights is None else weights
        return of_rounds([rounds or [] for rounds in by_rank], lengths, weights)

    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        """Return the stretches in which a packed total ends: one payload each."""
        return layout.chunks(1)

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """Return the bytes that `rank` sends in one `sum`; None where they depend on the data.

        Args:
            nbytes: of one rank's payload as it travels: of its wire tensor where all ranks know length and type, else
                packed.
            world_size: number of ranks.
            rank: which one.
            elementwise: whether the payload is; others may be merged on their way and then change their size.
            itemsize: bytes of one element of an elementwise payload, below which nothing is cut.
        """
        if world_size == 1:
            return 0
        if not elementwise:
            return None
        rounds = self.rounds(world_size, rank, Layout.dense(nbytes // itemsize, itemsize)) or []
        return sum(round_.nbytes(message) for round_ in rounds for message in round_.sends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingSum:
    """A sum under way.

    Attributes:
        wait: blocks until nothing is to come from other ranks; `finish` does so too.
        finish: does what is left, which sends nothing, and returns the sum; to be called once.
    """

    wait: Callable[[], object]
    finish: Callable[[], Payload]

    @classmethod
    def done(cls, total: Payload) -> Self:
        """A sum that is there."""
        return cls(wait=lambda: None, finish=lambda: total)


class BoundCollective:
    """A collective at work. All ranks call with payloads of one kind and length, in the same order.

    Element-wise payloads travel as bare wire tensors and are added in place; others travel packed and are merged.

    Attributes:
        options: what was chosen.
        transport: the ranks that take part.
    """

    def __init__(self, options: Collective, transport: Transport) -> None:
        self.options = options
        self.transport = transport
        self._scratch = Scratch()
        self._rounds: dict[Layout, list[Round]] = {}  # buckets come again at every step

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
        return self.start(payload, key, op).finish()

    def start(self, payload: Payload, key: Key, op: ReduceOp = "sum") -> PendingSum:
        """Begin a `sum`, and return while its messages are under way where all of them leave at its beginning.

        Several sums may be under way: all ranks start them in the same order and finish them in any.
        """
        for leaf in leaves(payload):
            if reason := self.options.refusal(type(leaf)):
                raise PayloadError(reason)
            if op == "max" and not leaf.elementwise:
                raise PayloadError(
                    f"a maximum over ranks needs element-wise payloads, and {type(leaf).__name__} is not one"
                )
        if self.transport.world_size == 1:
            return PendingSum.done(payload)
        layout = Layout.of(payload, key)
        groups = layout.by_type() if self.options.carries_wires else []
        if len(groups) > 1:
            return self._start_by_type(leaves(payload), groups, key, op)
        return self.start_like(payload, layout, op)

    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        """`start` for what `sum_like` takes; all is done at once where messages depend on what came before them."""
        return PendingSum.done(self.sum_like(payload, layout, op))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """A class that says anew how it sums does not inherit how that was begun."""
        super().__init_subclass__(**kwargs)
        if "sum_like" in cls.__dict__ and "start_like" not in cls.__dict__:
            cls.start_like = BoundCollective.start_like  # type: ignore[method-assign]

    def sum_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> Payload:
        """`sum` for two ranks or more and payloads that may ride here.

        Args:
            payload: this rank's contribution, which may be of another kind on every rank (sums of unequally many).
            layout: the same on all ranks; says where to cut and how long messages can be.
            op: "max" for elementwise payloads only.
        """
        rounds = self.rounds_of(layout)
        if layout.itemsize is None:
            pieces = PackedPieces(self.transport, payload, layout)
            pieces.run(rounds)
            return pieces.total()
        wire = payload.wire
        run_in_place(self.transport, wire, rounds, op, self._scratch, lost_on_wire(payload))
        return payload.with_wire(wire)

    def rounds_of(self, layout: Layout) -> list[Round]:
        """What this rank sends and receives in one sum."""
        if layout not in self._rounds:
            self._rounds[layout] = self.options.rounds(self.transport.world_size, self.transport.rank, layout) or []
        return self._rounds[layout]

    def _start_by_type(
        self, payloads: tuple[Payload, ...], groups: list[tuple[int, ...]], key: Key, op: ReduceOp
    ) -> PendingSum:
        """Element-wise payloads of several types: those of one type travel together."""
        sums = [self.start(Bundle([payloads[index] for index in indices]), key, op) for indices in groups]

        def finish() -> Payload:
            totals = list(payloads)
            for indices, sum_ in zip(groups, sums, strict=True):
                for index, leaf in zip(indices, leaves(sum_.finish()), strict=True):
                    totals[index] = leaf
            return Bundle(totals)

        return PendingSum(wait=lambda: [sum_.wait() for sum_ in sums], finish=finish)

    def broadcast(self, payload: Payload | None, src: int, key: Key) -> Payload:
        """`payload` of rank `src`, on every rank; the others pass None. Every rank must call.

        Down a binomial tree: rank `src` sends to ceil(log2 n) others, all ranks together n-1 times the packed payload.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        packed = None if payload is None else messages.pack(payload, self.transport)
        return unpack(messages.broadcast_bytes(self.transport, packed, src))

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
        """Release what outlives a call (mapped memory). Every rank must call."""
