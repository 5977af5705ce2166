"""Round: what one rank sends and receives at the same time, as data; a sum is a list of rounds.

The lists of all ranks mirror each other: what one sends another receives, message for message and in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from collectives.payloads.bundle import Bundle

Effect = Literal["replace", "own + received", "received + own", "collect"]
"""What a receiver does with a message: it is the result, is added on either side, or waits until all have come."""


Place = tuple[int, int, int]
"""(start, stop, number) of a piece"""


class Piece(NamedTuple):
    """A stretch of elements in a message, packed as a payload of its own unless bare elements travel.

    Attributes:
        start, stop: first element and one past the last.
        terms: the ranks whose contributions are inside.
        number: tells pieces of no elements apart that lie at the same place.
    """

    start: int
    stop: int
    terms: frozenset[int]
    number: int = 0

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.stop - self.start

    @property
    def place(self) -> Place:
        """What stays the same while contributions are added."""
        return self.start, self.stop, self.number


PackedLengths = Callable[[Piece], Sequence[int]]
"""Packed bytes of each payload in a piece: one for most kinds, one per layer for a bundle of layers."""


class Message(NamedTuple):
    """One message.

    Attributes:
        peer: the rank that it goes to or comes from.
        pieces: what is in it, laid end to end.
        effect: what its receiver does with it.
    """

    peer: int
    pieces: tuple[Piece, ...]
    effect: Effect = "replace"

    @property
    def stretch(self) -> slice:
        """Its elements in a wire tensor, of which the pieces are neighbours."""
        return slice(self.pieces[0].start, self.pieces[-1].stop)

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return sum(piece.numel for piece in self.pieces)


@dataclasses.dataclass
class Round:
    """What one rank sends and receives at the same time.

    Attributes:
        itemsize: bytes per element where bare elements of a wire tensor travel; None where payloads travel packed.
        sends: in the state in which the previous rounds left them.
        receives: what comes meanwhile, applied in this order.
    """

    itemsize: int | None = None
    sends: list[Message] = dataclasses.field(default_factory=list)
    receives: list[Message] = dataclasses.field(default_factory=list)

    def send(self, peer: int, *pieces: Piece) -> None:
        """Add a message; one of no bare elements is left out on both sides."""
        if (message := Message(peer, pieces)).numel or self.itemsize is None:
            self.sends.append(message)

    def receive(self, peer: int, *pieces: Piece, effect: Effect = "replace") -> None:
        """Add what another rank sends.

        A message that replaces bare elements may be received in place and posted early: the total holds what was sent
        from there, so it cannot come before that send was read.
        """
        if (message := Message(peer, pieces, effect)).numel or self.itemsize is None:
            self.receives.append(message)

    def nbytes(self, message: Message, packed_lengths: PackedLengths | None = None) -> int:
        """Bytes of one of its messages.

        Args:
            message: sent or received here.
            packed_lengths: asked for packed pieces only; a union's length follows from the data.
        """
        if self.itemsize is not None:
            return self.itemsize * message.numel
        if packed_lengths is None:
            raise ValueError("packed messages have no length of their own; say how long each piece is")
        lengths = [length for piece in message.pieces for length in packed_lengths(piece)]
        return lengths[0] if len(lengths) == 1 else Bundle.packed_nbytes(lengths)
