"""A message that moves only while its own rank posts or waits, as over sockets and through memory that ranks map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from typing_extensions import override

from collectives.transport.base import Pending


class Message(Protocol):
    """What moves."""

    @property
    def is_done(self) -> bool:
        """Whether all of it has gone through."""


M = TypeVar("M", bound=Message)


class UnderWay(Pending, Generic[M]):
    """A message and whom it waits for.

    Args:
        message: sent or received.
        peer: the rank it goes to or comes from.
        move: moves all that is under way until this message from or to `peer` has gone through.
    """

    def __init__(self, message: M, peer: int, move: Callable[[M, int], None]) -> None:
        self._message = message
        self._peer = peer
        self._move = move

    @override
    def wait(self) -> None:
        if not self._message.is_done:
            self._move(self._message, self._peer)
