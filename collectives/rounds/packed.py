"""Rounds carried out on packed payloads, which are merged on their way, collected, or passed on unopened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from collectives.payloads.base import Payload, shifted, unpack
from collectives.payloads.bundle import Bundle, members
from collectives.rounds.base import Message, Piece, Place, Round
from collectives.rounds.layout import Layout
from collectives.transport import messages
from collectives.transport.base import Incoming, Transport


class PackedPieces:
    """What a rank holds of a sum under way.

    Args:
        transport: the ranks.
        payload: this rank's contribution; keeps what rounding takes off the sums that this rank makes.
        layout: the same on all ranks; says how long messages can be.
    """

    def __init__(self, transport: Transport, payload: Payload, layout: Layout) -> None:
        self._transport = transport
        self._num_leaves = len(layout.leaves)
        self._keep_lost = payload.keep_lost
        self._held: dict[Place, Payload] = {(0, layout.numel, 0): payload}
        self._collected: dict[Place, dict[int, Payload]] = {}
        self._packed: dict[tuple[Piece, ...], torch.Tensor] = {}  # passing on what came costs no packing
        self._complete: list[Place] = []

    def __getitem__(self, place: Place) -> Payload:
        """What is held of these elements, cut from the smallest stretch around them."""
        if place not in self._held:
            start, stop, _ = place
            around = [held for held in self._held if held[0] <= start and stop <= held[1]]
            smallest = min(around, key=lambda held: held[1] - held[0])
            return self._held[smallest].slice(start - smallest[0], stop - smallest[0])
        return self._held[place]

    def __setitem__(self, place: Place, payload: Payload) -> None:
        self._held[place] = payload

    def terms(self, place: Place) -> list[Payload]:
        """What was collected of these elements and what is held, in rank order."""
        by_rank = {**self._collected.get(place, {}), self._transport.rank: self[place]}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def total(self) -> Payload:
        """All that holds every rank's contribution, laid end to end; what is empty only where there is nothing else."""
        places = sorted(self._complete)
        return together([self[place] for place in places if place[0] < place[1]] or [self[places[0]]])

    def run(self, rounds: Iterable[Round]) -> None:
        """Carry out rounds of packed payloads."""
        for round_ in rounds:
            self.apply(round_, self.post(round_))

    def post(self, round_: Round) -> Incoming:
        """Start the messages of a round."""
        sends = [(self._pack(message), message.peer) for message in round_.sends]
        receives = [(self._bound(message), message.peer) for message in round_.receives]
        return self._transport.send_receive(sends, receives)

    def apply(self, round_: Round, incoming: Incoming) -> None:
        """Wait for the messages of a round, and do with each what the round says."""
        for message, buffer in zip(round_.receives, incoming.wait(), strict=True):
            self._receive(message, buffer)

    def _bound(self, message: Message) -> int:
        return messages.bound_nbytes(message.numel, self._num_leaves)

    def _pack(self, message: Message) -> torch.Tensor:
        pieces = message.pieces
        if pieces not in self._packed:
            payload = together([self[piece.place] for piece in pieces])
            self._packed[pieces] = packed = messages.pack(payload, self._transport, self._bound(message))
            if self._is_own_result(pieces):  # the owner reads what the others will read
                self._replace(pieces, unpack(packed))
        return self._packed[pieces]

    def _receive(self, message: Message, buffer: torch.Tensor) -> None:
        received = unpack(buffer)
        if message.effect == "replace":
            self._packed[message.pieces] = buffer[: received.nbytes]
            self._replace(message.pieces, received)
            return
        for piece, part in zip(message.pieces, _parts(message.pieces, received), strict=True):
            place, keep_lost = piece.place, shifted(self._keep_lost, piece.start)
            if message.effect == "own + received":
                self[place] = self[place].add(part, keep_lost)
            elif message.effect == "received + own":
                self[place] = part.add(self[place], keep_lost)
            else:
                self._collected.setdefault(place, {})[message.peer] = part

    def _replace(self, pieces: Sequence[Piece], payload: Payload) -> None:
        for piece, part in zip(pieces, _parts(pieces, payload), strict=True):
            self[piece.place] = part
            self._complete.append(piece.place)

    def _is_own_result(self, pieces: Sequence[Piece]) -> bool:
        """Whether all ranks' contributions are inside, and it was not received."""
        if len(pieces[0].terms) < self._transport.world_size:
            return False
        return any(piece.place not in self._complete for piece in pieces)


def together(payloads: Sequence[Payload]) -> Payload:
    """Several payloads as one message; one stands for itself."""
    return payloads[0] if len(payloads) == 1 else Bundle(payloads)


def _parts(pieces: Sequence[Piece], payload: Payload) -> list[Payload]:
    return members(payload, [piece.numel for piece in pieces]) if len(pieces) > 1 else [payload]
