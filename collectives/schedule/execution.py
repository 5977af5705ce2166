"""Execute the rounds of messages of a sum over ranks: in place on a bare tensor, or with packed payloads."""

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

# (first element in the wire tensor, rounding errors of the sums from there on, fp32)
WireLost = Callable[[int, torch.Tensor], None]


def lost_on_wire(payload: Payload) -> WireLost | None:
    """Return a function that passes rounding errors to `payload.keep_lost`; None if `keep_lost` is None.

    The function gets the index of the first error in the tensor that this element-wise payload sends; `keep_lost` gets
    the indices in the dense tensor that the payload stands for.
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


# Receive buffers, reused from call to call: touching new pages costs as much as adding the message.
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

    Elements that are collected in a round are added in rank order at its end, and rounded once.

    Args:
        transport: connects the ranks.
        wire: the tensor to sum, 1-D, mutated.
        rounds: the rounds of this rank; those of all ranks must match.
        op: how to combine two elements.
        scratch: memory for received messages by dtype, reused from call to call; mutated.
        lost: called with the first element and the errors, fp32, of rounding this rank's sums to 16 bits.
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

    The buffer of a message that replaces elements is a part of `wire`; others lie in scratch memory. If `is_eager`,
    every round has separate memory. Otherwise two areas alternate, because buffers are posted at most one round ahead.
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
        payload: this rank's contribution; its `keep_lost` gets the rounding errors of this rank's sums.
        layout: sizes of the payloads, the same on all ranks; limits the length of messages.

    Attributes:
        held: payloads by their place (start, stop, number); pieces at other places are cut from them.
    """

    def __init__(self, transport: Transport, payload: Payload, layout: Layout) -> None:
        self._transport = transport
        self._num_leaves = len(layout.leaves)
        self._keep_lost = payload.keep_lost
        self.held: dict[Place, Payload] = {(0, layout.numel, 0): payload}
        self._collected: dict[Place, dict[int, Payload]] = {}
        self._packed: dict[tuple[Piece, ...], torch.Tensor] = {}  # received messages are passed on without packing
        self._complete: list[Place] = []

    def __getitem__(self, place: Place) -> Payload:
        """Return the payload held at `place`, (start, stop, number), cut from the smallest payload that contains it."""
        if place in self.held:
            return self.held[place]
        start, stop, _ = place
        around = [held for held in self.held if held[0] <= start and stop <= held[1]]
        smallest = min(around, key=lambda held: held[1] - held[0])
        return self.held[smallest].slice(start - smallest[0], stop - smallest[0])

    def terms(self, place: Place) -> list[Payload]:
        """Return all ranks' payloads at `place`, (start, stop, number), as far as this rank has them, in rank order."""
        by_rank = {**self._collected.get(place, {}), self._transport.rank: self[place]}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def total(self) -> Payload:
        """Return the sum over all ranks as one payload, once all rounds of messages have run.

        Parts without elements are left out, unless all are empty.
        """
        places = sorted(self._complete)
        return together([self[place] for place in places if place[0] < place[1]] or [self[places[0]]])

    def run(self, rounds: Iterable[Round], combine: Callable[[Place, list[Payload]], Payload] | None = None) -> None:
        """Execute rounds one after another: send this rank's pieces, and apply the received ones.

        Args:
            rounds: the rounds of this rank.
            combine: returns what this rank holds at a place after a round in which it has collected the payloads of
                others there, given the payloads of all ranks in rank order; None to leave them as they are.
        """
        for round_ in rounds:
            self.apply(round_, self.post(round_))
            if combine is not None:
                collects = [message for message in round_.receives if message.effect == "collect"]
                for place in dict.fromkeys(piece.place for message in collects for piece in message.pieces):
                    self.held[place] = combine(place, self.terms(place))

    def post(self, round_: Round) -> Callable[[], list[torch.Tensor]]:
        """Start sending and receiving the messages of a round.

        Return a function that waits for them and returns the received ones, as `apply` needs it.
        """
        sends = [(self._pack(message), message.peer) for message in round_.sends]
        receives = [(bound_nbytes(message.numel, self._num_leaves), message.peer) for message in round_.receives]
        return self._transport.send_receive(sends, receives)

    def apply(self, round_: Round, wait: Callable[[], list[torch.Tensor]]) -> None:
        """Wait for the messages of a round with `wait`, and apply each received message as its `effect` says.

        Raises:
            PayloadError: a message is damaged, or has another number of elements; what is collected may have any.
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
        """Return the sum of two payloads of the elements of a piece, of which one was received."""
        return first.add(second, shifted(self._keep_lost, piece.start))

    def _pack(self, message: PieceMessage) -> torch.Tensor:
        pieces = message.pieces
        if pieces not in self._packed:
            payload = together([self[piece.place] for piece in pieces])
            bound = bound_nbytes(message.numel, self._num_leaves)
            self._packed[pieces] = packed = messages.pack(payload, self._transport, bound)
            is_result = len(pieces[0].terms) == self._transport.world_size
            if is_result and any(piece.place not in self._complete for piece in pieces):  # completed on this rank
                self._replace(pieces, unpack(packed))  # the owner decodes the same bytes as all others
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
