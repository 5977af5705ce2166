"""Rounds: descriptions of the messages that one rank sends and receives at the same time.

One rank's part of a sum is a list of rounds. The lists of all ranks match: each message that one rank sends, another
receives, in the same order.
"""

import dataclasses
from typing import Literal, NamedTuple

# How a receiver applies a message: it replaces the own elements, is added to them in this order, or is kept as a term.
ReceiveEffect = Literal["replace", "own + received", "received + own", "collect"]
Place = tuple[int, int, int]  # (start, stop, number) of a piece


class Piece(NamedTuple):
    """A range of elements in a message. In a message of packed payloads, each piece is a separate payload.

    Attributes:
        start, stop: first element and one past the last.
        terms: the ranks whose contributions the elements contain.
        number: distinguishes empty pieces with the same `start`.
    """

    start: int
    stop: int
    terms: frozenset[int]
    number: int = 0

    @property
    def numel(self) -> int:
        """Return the number of elements of the piece."""
        return self.stop - self.start

    @property
    def place(self) -> Place:
        """Return (start, stop, number), which stay the same when other ranks' contributions are added."""
        return self.start, self.stop, self.number


class Message(NamedTuple):
    """A message from or to another rank.

    Attributes:
        peer: the other rank.
        pieces: the pieces in the message, in order.
        effect: how the receiver applies the message.
    """

    peer: int
    pieces: tuple[Piece, ...]
    effect: ReceiveEffect = "replace"

    @property
    def stretch(self) -> slice:
        """Return the message's elements as a slice of a wire tensor, in which its pieces must be contiguous."""
        return slice(self.pieces[0].start, self.pieces[-1].stop)

    @property
    def numel(self) -> int:
        """Return the number of elements of all pieces together."""
        return sum(piece.numel for piece in self.pieces)


@dataclasses.dataclass
class Round:
    """The messages that one rank sends and receives at the same time.

    Attributes:
        itemsize: bytes per element if messages are parts of a wire tensor; None if they are packed payloads.
        sends: messages to send, with the values that the previous rounds produced.
        receives: messages to receive, applied in this order.
    """

    itemsize: int | None = None
    sends: list[Message] = dataclasses.field(default_factory=list)
    receives: list[Message] = dataclasses.field(default_factory=list)

    def send(self, peer: int, *pieces: Piece) -> None:
        """Add a message to send; parts of a wire tensor that have no elements are not sent."""
        if (message := Message(peer, pieces)).numel or self.itemsize is None:
            self.sends.append(message)

    def receive(self, peer: int, *pieces: Piece, effect: ReceiveEffect = "replace") -> None:
        """Add a message to receive; parts of a wire tensor that have no elements are not sent.

        A message that replaces elements of a wire tensor may be received in place and posted early: it contains what
        this rank sent from there, so it cannot arrive before that send has completed.
        """
        if (message := Message(peer, pieces, effect)).numel or self.itemsize is None:
            self.receives.append(message)
