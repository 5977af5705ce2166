"""Base classes of collectives: algorithms that sum payloads over ranks so that every rank gets the same bits.

A `Collective` holds the options that a user chooses; a `BoundCollective` runs it among the ranks of a transport.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Protocol, Self

import torch

from collectives.options import Incompatible, Options
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.bundle import Bundle
from collectives.schedule.execution import PackedPieces, Scratch, lost_on_wire, run_in_place
from collectives.schedule.layout import Key, Layout, Stretch, leaves
from collectives.schedule.rounds import Round
from collectives.transport import messages
from collectives.transport.base import ReduceOp, Transport

__all__ = ["AnswerEncoder", "BoundCollective", "Collective", "Key", "PendingSum"]


class AnswerEncoder(Protocol):
    """Tell a server the sizes of the layers, and encode its answers."""

    def numel(self, layer_id: int) -> int:
        """Return the number of elements of a layer."""

    def encode(self, total: torch.Tensor, layers: tuple[int, ...]) -> Payload:
        """Encode a server's answer.

        Args:
            total: the sum, fp32 [numel of all layers].
            layers: ids of the layers, in the order in which they lie in `total`.
        """

    def commit(self) -> None:
        """Accept the state proposed since the last `commit` or `drop`."""

    def drop(self) -> None:
        """Discard the proposed state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state by what `state_dict` returned."""


@dataclasses.dataclass(kw_only=True)
class Collective(Options, abc.ABC):
    """Sum payloads over ranks. A subclass is named after its file; its dataclass fields are its options.

    Use it as `Ring().bind(transport).sum(payload, key=(0, 1))`; the options do not change. A collective that adds
    payloads on their way only has to define `rounds`; others also define what they accept, send and return.

    Attributes:
        carries_wires: element-wise payloads travel as bare wire tensors, whose length and dtype all ranks know.
        leaves_terms: other payloads come back as a list of terms that are not added yet.
        decodes: other payloads come back decoded, or encoded again, instead of as a sum of the same payload kind.
        finds_maxima: it can also compute the maximum of a dense tensor over ranks.
        recodes: sums that are not element-wise are encoded again by the run's compressor.
        keeps_residuals: it adds the error of its answers to the next sums; this needs a training run's layers.
    """

    carries_wires: ClassVar[bool] = True
    leaves_terms: ClassVar[bool] = False
    decodes: ClassVar[bool] = False

    finds_maxima = True
    recodes = False
    keeps_residuals = False

    def bind(self, transport: Transport, downlink: AnswerEncoder | None = None) -> BoundCollective:
        """Return a new instance that runs among the ranks of a transport; every rank must call.

        Args:
            transport: connects the ranks.
            downlink: encodes the answers of a server; other collectives ignore it.

        Raises:
            Incompatible: the options do not fit this number of ranks.
        """
        return BoundCollective(self, transport)

    def check_compatible(self, kind: type[Payload]) -> None:
        """Check that it can sum payloads of a kind; one that leaves terms or decodes takes all.

        Raises:
            Incompatible: it cannot; the message names what would work.
        """
        if not (kind.elementwise or kind.addable or self.leaves_terms or self.decodes):
            raise Incompatible(
                f"{self.component_name} adds payloads on their way, which {kind.__name__} does not allow; "
                "use collective allgather or server"
            )

    def check_ranks(self, world_size: int) -> None:
        """Check that these options work with `world_size` ranks.

        Raises:
            Incompatible: they do not; the message names what would work.
        """

    @abc.abstractmethod
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round] | None:
        """Return what `rank` sends and receives in one sum; None if a backend or shared memory moves the payloads.

        Args:
            world_size: number of ranks, two or more.
            rank: the rank whose messages to return.
            layout: the layout of all ranks' payloads; several dtypes are summed one after another (`Layout.by_type`).
        """

    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        """Return the stretches of elements into which a packed total is divided, one payload each."""
        return layout.chunks(1)

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """Return the bytes that `rank` sends in one `sum`; None if they depend on the data.

        Args:
            nbytes: bytes of one rank's payload: of its wire tensor if all ranks know length and dtype, else packed.
            world_size: number of ranks.
            rank: the rank that sends.
            elementwise: whether the payload is element-wise; others may be merged on their way and change their size.
            itemsize: bytes of one element of an element-wise payload; payloads are cut between elements.
        """
        if world_size == 1:
            return 0
        if not elementwise:
            return None
        rounds = self.rounds(world_size, rank, Layout.dense(nbytes // itemsize, itemsize)) or []
        return sum(itemsize * message.numel for round_ in rounds for message in round_.sends)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingSum:
    """A sum whose messages are under way.

    Attributes:
        wait: blocks until all messages from other ranks have arrived; `finish` does so too.
        finish: completes the sum without sending anything, and returns it; call it once.
    """

    wait: Callable[[], object]
    finish: Callable[[], Payload]

    @classmethod
    def done(cls, total: Payload) -> Self:
        """Return a sum that is already complete."""
        return cls(wait=lambda: None, finish=lambda: total)


class BoundCollective:
    """Run a collective. All ranks must call with payloads of the same kind and length, in the same order.

    Element-wise payloads travel as bare wire tensors and are added in place; others travel packed and are merged.

    Attributes:
        options: the collective with its options.
        transport: connects the ranks that take part.
    """

    def __init__(self, options: Collective, transport: Transport) -> None:
        self.options = options
        self.transport = transport
        self._scratch: Scratch = {}
        self._rounds: dict[Layout, list[Round]] = {}  # each bucket's layout comes back at every step

    def sum(self, payload: Payload, key: Key, op: ReduceOp = "sum") -> Payload:
        """Return the sum (or maximum) over ranks, the same bits on every rank; every rank must call.

        Args:
            payload: this rank's contribution; its tensors may be overwritten.
            key: ids of the layers inside; identifies messages, shards and server state.
            op: "max" works for element-wise payloads only.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
            Incompatible: this collective cannot sum payloads of this kind.
        """
        return self.start(payload, key, op).finish()

    def start(self, payload: Payload, key: Key, op: ReduceOp = "sum") -> PendingSum:
        """Begin a `sum`; return before its messages arrive if none of them depends on an earlier one.

        Several sums may be under way: all ranks must start them in the same order and may finish them in any order.
        """
        for leaf in leaves(payload):
            self.options.check_compatible(type(leaf))
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
        """Begin a sum over two or more ranks, of payloads that `check_compatible` accepts.

        The default does all of it at once, because messages may depend on earlier ones.

        Args:
            payload: this rank's contribution; its kind may differ between ranks, if it already is a sum of several.
            layout: the same on all ranks; determines where to cut and how long messages can be.
            op: "max" works for element-wise payloads only.
        """
        rounds = self.rounds_of(layout)
        if layout.itemsize is None:
            pieces = PackedPieces(self.transport, payload, layout)
            pieces.run(rounds)
            return PendingSum.done(pieces.total())
        wire = payload.wire
        run_in_place(self.transport, wire, rounds, op, self._scratch, lost_on_wire(payload))
        return PendingSum.done(payload.with_wire(wire))

    def rounds_of(self, layout: Layout) -> list[Round]:
        """Return what this rank sends and receives in one sum."""
        if layout not in self._rounds:
            self._rounds[layout] = self.options.rounds(self.transport.world_size, self.transport.rank, layout) or []
        return self._rounds[layout]

    def _start_by_type(
        self, payloads: tuple[Payload, ...], groups: list[tuple[int, ...]], key: Key, op: ReduceOp
    ) -> PendingSum:
        # those of one dtype travel together
        sums = [self.start(Bundle([payloads[index] for index in indices]), key, op) for indices in groups]

        def finish() -> Payload:
            totals = list(payloads)
            for indices, sum_ in zip(groups, sums, strict=True):
                for index, leaf in zip(indices, leaves(sum_.finish()), strict=True):
                    totals[index] = leaf
            return Bundle(totals)

        return PendingSum(wait=lambda: [sum_.wait() for sum_ in sums], finish=finish)

    def broadcast(self, payload: Payload | None, src: int, key: Key) -> Payload:
        """Return the payload of rank `src` on every rank; the others pass None. Every rank must call.

        It travels down a binomial tree: rank `src` sends to ceil(log2 n) others, and all ranks together send n-1 times
        the packed payload.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        packed = None if payload is None else messages.pack(payload, self.transport)
        return unpack(messages.broadcast_bytes(self.transport, packed, src))

    def commit(self) -> None:
        """Accept the state proposed since the last `commit` or `drop`, for example a server's residuals."""

    def drop(self) -> None:
        """Discard the proposed state, because the step is skipped."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank that a checkpoint must hold; empty for most collectives."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state by what `state_dict` returned."""

    def close(self) -> None:
        """Release what outlives a call, such as mapped memory; every rank must call."""
