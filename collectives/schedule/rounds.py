"""Rounds: descriptions of what one rank sends and receives at the same time; a sum is a list of rounds.

The lists of all ranks match: each message that one rank sends, another receives, in the same order.
"""

import dataclasses
from typing import Literal, NamedTuple

# How a receiver applies a message: it replaces the own elements, is added to them in this order, or is kept as a term.
ReceiveEffect = Literal["replace", "own + received", "received + own", "collect"]
Place = tuple[int, int, int]  # (start, stop, number) of a piece


class Piece(NamedTuple):
    """A stretch of elements in a message, packed as a separate payload unless elements of a wire tensor travel.

    Attributes:
        start, stop: first element and one past the last.
        terms: the ranks whose contributions are inside.
        number: distinguishes empty pieces at the same place.
    """

    start: int
    stop: int
    terms: frozenset[int]
    number: int = 0

    @property
    def numel(self) -> int:
        """Return its number of elements."""
        return self.stop - self.start

    @property
    def place(self) -> Place:
        """Return its place, which does not change when contributions are added."""
        return self.start, self.stop, self.number


class Message(NamedTuple):
    """A message from or to another rank.

    Attributes:
        peer: the other rank.
        pieces: the pieces in it, in order.
        effect: how the receiver applies it.
    """

    peer: int
    pieces: tuple[Piece, ...]
    effect: ReceiveEffect = "replace"

    @property
    def stretch(self) -> slice:
        """Return its elements in a wire tensor, in which its pieces must be contiguous."""
        return slice(self.pieces[0].start, self.pieces[-1].stop)

    @property
    def numel(self) -> int:
        """Return the number of elements of all pieces."""
        return sum(piece.numel for piece in self.pieces)


@dataclasses.dataclass
class Round:
    """The messages that one rank sends and receives at the same time.

    Attributes:
        itemsize: bytes per element if elements of a wire tensor travel; None if payloads travel packed.
        sends: messages to send, with the contents that the previous rounds left.
        receives: messages to receive, applied in this order.
    """

    itemsize: int | None = None
    sends: list[Message] = dataclasses.field(default_factory=list)
    receives: list[Message] = dataclasses.field(default_factory=list)

    def send(self, peer: int, *pieces: Piece) -> None:
        """Add a message to send; both sides leave out a message without elements of a wire tensor."""
        if (message := Message(peer, pieces)).numel or self.itemsize is None:
            self.sends.append(message)

    def receive(self, peer: int, *pieces: Piece, effect: ReceiveEffect = "replace") -> None:
        """Add a message to receive.

        A message that replaces elements of a wire tensor may be received in place and posted early: it contains what
        this rank sent from there, so it cannot arrive before that send has completed.
        """
        if (message := Message(peer, pieces, effect)).numel or self.itemsize is None:
            self.receives.append(message)
