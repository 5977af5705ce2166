"""Execute the rounds of messages of a sum over ranks: either in place on a bare tensor, or with packed payloads."""

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

import torch

from collectives.payloads.base import Payload, PayloadError, shifted, unpack
from collectives.payloads.bundle import Bundle, members
from collectives.payloads.sparse import IndexedValues
from collectives.schedule.rounds import Layout, Piece, PieceMessage, Place, Round, leaves
from collectives.transport import messages
from collectives.transport.base import Pending, ReduceOp, Transport, wait_all
from collectives.transport.messages import bound_nbytes, combine_, sum_wires

# Called with the rounding errors, fp32, of consecutive sums: (index of the first of them in the wire tensor, errors).
WireLost = Callable[[int, torch.Tensor], None]


def lost_on_wire(payload: Payload) -> WireLost | None:
    """Return a function that passes rounding errors to `payload.keep_lost`; None if `keep_lost` is None.

    The function is called with the index of the first error in the tensor that this element-wise payload sends. It
    calls `keep_lost` with indices in the dense tensor that the payload stands for.
    """
    if (keep_lost := payload.keep_lost) is None:
        return None
    members = leaves(payload)
    starts = itertools.accumulate((member.wire.numel() for member in members), initial=0)
    offsets = itertools.accumulate((member.numel for member in members), initial=0)
    placed = list(zip(members, offsets, itertools.pairwise(starts), strict=False))

    def lost(start: int, values: torch.Tensor) -> None:
        for member, offset, (first, last) in placed:
            begin, end = max(start, first), min(start + values.numel(), last)
            if begin >= end:
                continue
            part = values[begin - start : end - start]
            if isinstance(member, IndexedValues):
                keep_lost(offset, part, member.positions[begin - first : end - first])
            else:
                keep_lost(offset + begin - first, part)

    return lost


# Up to this size of the wire tensor, all messages are received into separate memory.
EAGER_BYTES = 16 << 20


# Receive buffers, reused by later calls because touching new memory pages takes as long as adding the message.
Scratch = dict[torch.dtype, torch.Tensor]


def run_in_place(
    transport: Transport,
    wire: torch.Tensor,
    rounds: list[Round],
    op: ReduceOp,
    scratch: Scratch,
    lost: WireLost | None = None,
) -> None:
    """Replace `wire` with the sum over ranks, by executing rounds of messages. Every rank must call this function.

    Contributions that are collected in a round are added in rank order at the end of the round, and rounded once.

    Args:
        transport: connects the ranks.
        wire: the tensor to sum, 1-D, mutated.
        rounds: this rank's rounds; they must match the rounds of the other ranks.
        op: how to combine two elements.
        scratch: memory for received messages by dtype, reused by later calls; mutated.
        lost: called with the rounding errors, fp32, of the sums that this rank rounds to 16 bits: (index of the first
            of these elements, errors).
    """
    is_eager = wire.nbytes <= EAGER_BYTES and not transport.in_step
    buffers = _buffers(wire, rounds, scratch, is_eager=is_eager)
    num_ahead = len(rounds) if is_eager else 0 if transport.in_step else 1
    receives: list[list[Pending]] = []
    sends: list[Pending] = []
    for index, round_ in enumerate(rounds):
        to_post = range(len(receives), min(index + num_ahead + 1, len(rounds)))
        incoming = [
            (buffer, message.peer)
            for later in to_post
            for buffer, message in zip(buffers[later], rounds[later].receives, strict=True)
        ]
        outgoing = [(wire[message.stretch], message.peer) for message in round_.sends]
        pendings = iter(transport.post(outgoing, incoming))
        receives += [list(itertools.islice(pendings, len(buffers[later]))) for later in to_post]
        sends += pendings
        wait_all(receives[index])
        collected: dict[tuple[int, int], dict[int, torch.Tensor]] = {}
        for message, buffer in zip(round_.receives, buffers[index], strict=True):
            stretch = message.stretch
            if message.effect == "collect":
                own = {transport.rank: wire[stretch]}
                collected.setdefault((stretch.start, stretch.stop), own)[message.peer] = buffer
            elif message.effect != "replace":
                combine_(wire[stretch], buffer, op, lost and functools.partial(lost, stretch.start))
        for (start, stop), by_rank in collected.items():
            terms = [by_rank[rank] for rank in sorted(by_rank)]
            wire[start:stop] = sum_wires(terms, op, lost=lost and functools.partial(lost, start))
    wait_all(sends)


def _buffers(wire: torch.Tensor, rounds: list[Round], scratch: Scratch, *, is_eager: bool) -> list[list[torch.Tensor]]:
    """Return the receive buffer of each message of each round.

    A message that replaces elements is received into its part of `wire`; other messages go to scratch memory. If
    `is_eager`, every round has separate memory. Otherwise rounds use two areas in turn, because buffers are posted at
    most one round ahead.
    """
    needs = [sum(message.numel for message in round_.receives if message.effect != "replace") for round_ in rounds]
    most = max(needs, default=0)
    starts = [0, *itertools.accumulate(needs)] if is_eager else [index % 2 * most for index in range(len(rounds))]
    numel, memory = sum(needs) if is_eager else 2 * most, scratch.get(wire.dtype)
    if memory is None or memory.numel() < numel or memory.device != wire.device:
        memory = scratch[wire.dtype] = wire.new_empty(numel)
    buffers = []
    for round_, start in zip(rounds, starts, strict=False):
        row = []
        for message in round_.receives:
            if message.effect == "replace":
                row.append(wire[message.stretch])
            else:
                row.append(memory[start : start + message.numel])
                start += message.numel
        buffers.append(row)
    return buffers


class PackedPieces:
    """The pieces (ranges of elements) that a rank holds during a sum of packed payloads, and their exchange.

    Args:
        transport: connects the ranks.
        payload: this rank's contribution; its `keep_lost` is called with the rounding errors of this rank's sums.
        layout: sizes of the payloads, the same on all ranks; determines the longest possible messages.

    Attributes:
        held: payloads by their place (start, stop, number); a piece at any other place is cut from one of them.
    """

    def __init__(self, transport: Transport, payload: Payload, layout: Layout) -> None:
        self._transport = transport
        self._num_leaves = len(layout.leaves)
        self._keep_lost = payload.keep_lost
        self.held: dict[Place, Payload] = {(0, layout.numel, 0): payload}
        self._collected: dict[Place, dict[int, Payload]] = {}
        self._packed: dict[tuple[Piece, ...], torch.Tensor] = {}  # so that a received message is not packed again
        self._complete: list[Place] = []

    def __getitem__(self, place: Place) -> Payload:
        """Return the payload at `place`, (start, stop, number), if needed cut from the smallest that contains it."""
        if place in self.held:
            return self.held[place]
        start, stop, _ = place
        around = [held for held in self.held if held[0] <= start and stop <= held[1]]
        smallest = min(around, key=lambda held: held[1] - held[0])
        return self.held[smallest].slice(start - smallest[0], stop - smallest[0])

    def terms(self, place: Place) -> list[Payload]:
        """Return the payloads of several ranks at `place`, (start, stop, number), in rank order.

        These are this rank's own payload, and those that it has collected from other ranks.
        """
        by_rank = {**self._collected.get(place, {}), self._transport.rank: self[place]}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def total(self) -> Payload:
        """Return the sum over all ranks as one payload; call this after all rounds of messages.

        The payload omits parts without elements, unless all parts are empty.
        """
        places = sorted(self._complete)
        return together([self[place] for place in places if place[0] < place[1]] or [self[places[0]]])

    def run(self, rounds: Iterable[Round], combine: Callable[[Place, list[Payload]], Payload] | None = None) -> None:
        """Execute rounds one after another: send this rank's pieces, and apply the received ones.

        Args:
            rounds: this rank's rounds.
            combine: called after a round in which this rank has collected the payloads of other ranks at a place, with
                the place and the payloads of all ranks in rank order; returns the payload to hold there. None: nothing
                is combined.
        """
        for round_ in rounds:
            self.apply(round_, self.post(round_))
            if combine is not None:
                collects = [message for message in round_.receives if message.effect == "collect"]
                for place in dict.fromkeys(piece.place for message in collects for piece in message.pieces):
                    self.held[place] = combine(place, self.terms(place))

    def post(self, round_: Round) -> Callable[[], list[torch.Tensor]]:
        """Start sending and receiving the messages of a round.

        Return a function for `apply`, which waits for all messages and returns the received ones.
        """
        sends = [(self._pack(message), message.peer) for message in round_.sends]
        receives = [(bound_nbytes(message.numel, self._num_leaves), message.peer) for message in round_.receives]
        return self._transport.send_receive(sends, receives)

    def apply(self, round_: Round, wait: Callable[[], list[torch.Tensor]]) -> None:
        """Wait for the messages of a round with `wait`, and apply each received message as its `effect` says.

        Raises:
            PayloadError: a message is damaged, or has the wrong number of elements. A message with effect "collect" may
                have any number of elements.
        """
        for message, buffer in zip(round_.receives, wait(), strict=True):
            received = unpack(buffer)
            if message.effect != "collect" and received.numel != message.numel:
                raise PayloadError(
                    f"rank {self._transport.names[message.peer]} sent {received.numel} elements instead of "
                    f"{message.numel}; all ranks must run the same configuration"
                )
            if message.effect == "replace":
                self._packed[message.pieces] = buffer[: received.nbytes]
                self._replace(message.pieces, received)
                continue
            for piece, part in zip(message.pieces, _parts(message.pieces, received), strict=True):
                place = piece.place
                if message.effect == "own + received":
                    self.held[place] = self.add(piece, self[place], part)
                elif message.effect == "received + own":
                    self.held[place] = self.add(piece, part, self[place])
                else:
                    self._collected.setdefault(place, {})[message.peer] = part

    def add(self, piece: Piece, first: Payload, second: Payload) -> Payload:
        """Return the sum of two payloads for a piece, one of which was received."""
        return first.add(second, shifted(self._keep_lost, piece.start))

    def _pack(self, message: PieceMessage) -> torch.Tensor:
        pieces = message.pieces
        if pieces not in self._packed:
            payload = together([self[piece.place] for piece in pieces])
            bound = bound_nbytes(message.numel, self._num_leaves)
            self._packed[pieces] = packed = messages.pack(payload, self._transport, bound)
            is_result = len(pieces[0].terms) == self._transport.world_size
            if is_result and any(piece.place not in self._complete for piece in pieces):  # this rank completed the sum
                self._replace(pieces, unpack(packed))  # decode the sent bytes here too, as all other ranks do
        return self._packed[pieces]

    def _replace(self, pieces: Sequence[Piece], payload: Payload) -> None:
        for piece, part in zip(pieces, _parts(pieces, payload), strict=True):
            self.held[piece.place] = part
            self._complete.append(piece.place)


def together(payloads: Sequence[Payload]) -> Payload:
    """Return a bundle of several payloads, or a single payload unchanged."""
    return payloads[0] if len(payloads) == 1 else Bundle(payloads)


def _parts(pieces: Sequence[Piece], payload: Payload) -> list[Payload]:
    return members(payload, [piece.numel for piece in pieces]) if len(pieces) > 1 else [payload]
