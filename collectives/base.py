"""Base classes of collectives: algorithms that sum payloads over ranks so that every rank gets the same bits.

A payload is an encoded tensor. A `Collective` holds the options that a user chooses; a `BoundCollective` is a
collective that is connected to the ranks of a transport, and sums.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self

import torch

from collectives.options import Incompatible, Options
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.bundle import Bundle
from collectives.refusals import Refusal, refuse
from collectives.schedule.execution import PackedPieces, Scratch, lost_on_wire, run_in_place
from collectives.schedule.rounds import Key, LayerStretch, Layout, Round, Stretch, leaves
from collectives.transport import messages
from collectives.transport.base import ReduceOp, Transport

__all__ = ["BoundCollective", "Collective", "Key", "PendingSum", "SumEncoder"]


class SumEncoder(Protocol):
    """Encodes partial sums again with a run's compressor; also knows the sizes of the layers."""

    def numel(self, layer_id: int) -> int:
        """Return the number of elements of the layer with this id."""

    def encode(self, total: torch.Tensor, stretches: Sequence[LayerStretch], hop: int = 0) -> Payload:
        """Return the payload in which a (partial) sum is sent to the next rank.

        Whole layers are encoded in the same way as gradients; any other parts are encoded as one payload.

        Args:
            total: the sum, fp32 [elements of all stretches].
            stretches: the parts of layers of which `total` consists, in order.
            hop: number of ranks that have already encoded these elements; random rounding differs between hops.
        """


@dataclasses.dataclass(frozen=True, kw_only=True)
class PendingSum:
    """A sum that was started and whose messages may still be under way.

    Attributes:
        wait: blocks until all messages from other ranks have arrived; `finish` does so too.
        finish: completes the sum without sending anything, and returns the summed payload; call it once.
    """

    wait: Callable[[], object]
    finish: Callable[[], Payload]

    @classmethod
    def done(cls, total: Payload) -> Self:
        """Return a `PendingSum` whose sum, `total`, is already complete."""
        return cls(wait=lambda: None, finish=lambda: total)


class BoundCollective:
    """A collective that is ready to sum among the ranks of one transport.

    All ranks must make the same calls in the same order, with payloads of the same kind and length. By default,
    element-wise payloads are sent as bare tensors and added in place; other payloads are sent packed and merged.

    Attributes:
        options: the collective with its options.
        transport: connects the ranks that take part.
    """

    def __init__(self, options: Collective, transport: Transport, encoder: SumEncoder | None = None) -> None:
        self.options, self.transport = options, transport
        self._encoder = encoder
        self._scratch: Scratch = {}
        self._rounds: dict[Layout, list[Round]] = {}  # cached, because each bucket has the same layout in every step

    def sum(self, payload: Payload, key: Key, op: ReduceOp = "sum") -> Payload:
        """Return the sum (or maximum) over ranks, with the same bits on every rank. Every rank must call this method.

        Args:
            payload: this rank's contribution; its tensors may be overwritten.
            key: ids of the layers in the payload; a server uses them to distribute layers and to find their residuals.
            op: "sum", or "max" for element-wise payloads only.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
            Incompatible: this collective cannot sum payloads of this kind.
        """
        return self.start(payload, key, op).finish()

    def start(self, payload: Payload, key: Key, op: ReduceOp = "sum") -> PendingSum:
        """Begin a `sum`; return before its messages arrive, if none of them depends on an earlier message.

        Several sums may be under way at once. All ranks must start them in the same order, but may finish them in any
        order.
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
        if len(groups) <= 1:
            return self.start_like(payload, layout, op)
        totals = list(leaves(payload))
        sums = [self.start(Bundle([totals[index] for index in indices]), key, op) for indices in groups]

        def finish() -> Payload:
            for indices, sum_ in zip(groups, sums, strict=True):
                for index, leaf in zip(indices, leaves(sum_.finish()), strict=True):
                    totals[index] = leaf
            return Bundle(totals)

        return PendingSum(wait=lambda: [sum_.wait() for sum_ in sums], finish=finish)

    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        """Begin a sum over two or more ranks, of payloads that have this layout and that `check_compatible` accepts.

        This default completes the sum before it returns, because a message may depend on an earlier one.

        Args:
            payload: this rank's contribution; if it is itself a sum of several payloads, its kind may differ by rank.
            layout: sizes and dtypes of the payloads, the same on all ranks; determines where payloads are cut and how
                long messages can be.
            op: "sum", or "max" for element-wise payloads only.
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
        """Return the rounds of messages that this rank sends and receives in one sum of payloads with this layout."""
        if layout not in self._rounds:
            self._rounds[layout] = self.options.rounds(self.transport.world_size, self.transport.rank, layout) or []
        return self._rounds[layout]

    def broadcast(self, payload: Payload | None, src: int, key: Key) -> Payload:
        """Return the payload of rank `src` on every rank; other ranks pass None. Every rank must call this method.

        The payload is sent down a binomial tree: rank `src` sends it to ceil(log2 n) ranks, which pass it on. All ranks
        together send the packed payload n-1 times.

        Raises:
            TransportError: a rank was lost, or did not answer in time.
        """
        packed = None if payload is None else messages.pack(payload, self.transport)
        return unpack(messages.broadcast_bytes(self.transport, packed, src))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tensors that this collective keeps on this rank between sums."""
        return sum(tensor.nbytes for tensor in self._scratch.values())

    def commit(self) -> None:
        """Make the state (such as residuals) that sums produced since the last `commit` or `drop` the current state."""

    def drop(self) -> None:
        """Discard the state that sums produced since the last `commit` or `drop`, when a step is skipped."""

    def state_dict(self) -> dict[str, Any]:
        """Return the collective's state on this rank, for a checkpoint; most collectives have none and return {}."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the collective's state on this rank with one that `state_dict` returned."""

    def close(self) -> None:
        """Release mapped memory and other resources that this object still holds. Every rank must call this method."""


@dataclasses.dataclass(kw_only=True)
class Collective(Options, abc.ABC):
    """An algorithm that sums payloads over ranks, with its options, which are its dataclass fields.

    A subclass is named after its file. Use it as `Ring().bind(transport).sum(payload, key=(0, 1))`; summing does not
    change the options. A subclass whose ranks add payloads at each hop only has to define `rounds`; other subclasses
    also define which payloads they accept, send and return.

    Attributes:
        carries_wires: True if element-wise payloads are sent as bare tensors, whose length and dtype all ranks know;
            False if they are sent packed, with a header.
        leaves_terms: True if the sum of payloads that are not element-wise is an `UnreducedSum`, the list of all ranks'
            payloads.
        decodes: True if the sum of payloads that are not element-wise is decoded, or encoded again, and so is not a
            payload of their kind.
        finds_maxima: True if the collective can also compute the maximum of a dense tensor over ranks.
        recodes: True if the sum of payloads that are not element-wise is encoded again by the run's compressor.
        keeps_residuals: True if the error of an encoded or rounded sum is added to the next sum of the same layers;
            this needs the layers of a training run.
        bound: the class that runs the collective among the ranks of a transport.
    """

    carries_wires: ClassVar[bool] = True
    leaves_terms: ClassVar[bool] = False
    decodes: ClassVar[bool] = False
    bound: ClassVar[Callable[..., BoundCollective]] = BoundCollective

    finds_maxima = True
    recodes = False
    keeps_residuals = False

    def bind(self, transport: Transport, encoder: SumEncoder | None = None) -> BoundCollective:
        """Return the `bound` collective that sums among the ranks of a transport. Every rank must call this method.

        Args:
            transport: connects the ranks.
            encoder: encodes partial sums again; used only if `recodes` or `keeps_residuals` is True.

        Raises:
            Incompatible: the options do not work with this number of ranks.
        """
        refuse(self.rank_refusals, transport.world_size)
        return self.bound(self, transport, encoder)

    def check_compatible(self, kind: type[Payload]) -> None:
        """Check that this collective can sum payloads of class `kind`.

        A collective that gathers payloads without adding them (`leaves_terms`), or decodes them (`decodes`), accepts
        every class.

        Raises:
            Incompatible: the collective cannot sum them; the message names collectives that can.
        """
        if not (kind.elementwise or kind.addable or self.leaves_terms or self.decodes):
            raise Incompatible(
                f"{self.component_name} adds payloads on their way, which {kind.__name__} does not allow; "
                "use collective allgather or server"
            )

    def rank_refusals(self, world_size: int) -> list[Refusal]:
        """Return a table for `refuse` of the reasons why these options do not work with `world_size` ranks."""
        return []

    @abc.abstractmethod
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round] | None:
        """Return the messages that `rank` sends and receives in one sum, as a list of rounds.

        Return None if the backend, shared memory or other collectives transfer the payloads.

        Args:
            world_size: number of ranks, two or more.
            rank: the rank whose messages to return.
            layout: sizes and dtypes of the payloads, the same on all ranks. Element-wise payloads of several dtypes are
                summed one dtype at a time (`Layout.by_type`).
        """

    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        """Return (first element, one past the last) of each payload in the result of a sum of packed payloads."""
        return layout.chunks(1)

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """Return the bytes that `rank` sends in one `sum`; None if they depend on the data.

        Args:
            nbytes: bytes of one rank's payload: of the bare tensor if the payload is element-wise and the collective
                `carries_wires`; otherwise of the packed payload.
            world_size: number of ranks.
            rank: the rank that sends.
            elementwise: True if the payload is element-wise; another payload may be merged at each hop, which changes
                its size.
            itemsize: bytes of one element of an element-wise payload; payloads are cut between elements.
        """
        if world_size == 1:
            return 0
        if not elementwise:
            return None
        rounds = self.rounds(world_size, rank, Layout.dense(nbytes // itemsize, itemsize)) or []
        return sum(itemsize * message.numel for round_ in rounds for message in round_.sends)


def without_residuals(collective: Collective) -> str:
    """Return options to advise in an error message, because `collective` needs the layers of a training run."""
    return "downlink=dense or downlink=union without error feedback" if collective.decodes else "collective allgather"
