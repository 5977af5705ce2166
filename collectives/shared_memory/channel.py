"""A channel: messages from one rank to another through a ring of bytes that both map.

The sender's line says how many bytes it has written since the start, the receiver's how many it has read; neither ever
writes what the other writes. A message is its length as eight bytes and then its bytes, filled up to a multiple of
eight; one that is longer than the ring goes through it in parts.
"""

from __future__ import annotations

import abc
import collections
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from collectives.shared_memory.memory import SharedMemory
from collectives.shared_memory.region import rounded_up
from collectives.transport.base import TransportError

WORD = 8
PARTS_PER_RING = 4  # the receiver reads one part while the sender writes the next ones


class Message:
    """A tensor on its way into a ring or out of it."""

    __slots__ = ("nbytes", "position", "raw")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.raw = tensor.detach().view(-1).view(torch.uint8).numpy()
        self.nbytes = len(self.raw)
        self.position = -WORD  # before its length has passed

    @property
    def is_done(self) -> bool:
        """All has passed."""
        return self.position == self.nbytes


class ChannelEnd(abc.ABC):
    """One side of a channel, with its messages under way, first come first served.

    Args:
        memory: where the ring and the lines are.
        ring: uint8, a part of the memory's data; its length is a multiple of `WORD`.
        own_line: where this side says how far it is.
        peer_line: where the other side says that.
        peer: what users call the other rank.
    """

    def __init__(self, memory: SharedMemory, ring: torch.Tensor, own_line: int, peer_line: int, peer: int) -> None:
        self._memory = memory
        self._address = ring.data_ptr()
        self._bytes = ring.numpy()
        self._words: np.ndarray[Any, np.dtype[np.uint64]] = self._bytes.view(np.uint64)
        self._part_bytes = max(WORD, len(self._bytes) // PARTS_PER_RING // WORD * WORD)
        self._own_line, self._peer_line = own_line, peer_line
        self._peer = peer
        self._passed = 0  # bytes since the start, on this side
        self._messages: collections.deque[Message] = collections.deque()

    def add(self, message: Message) -> None:
        """Put it behind the others."""
        self._messages.append(message)

    def advance(self) -> bool:
        """Let pass what can pass now; return whether anything did.

        Raises:
            TransportError: a message is longer than the buffer posted for it.
        """
        before = self._passed
        while self._messages and (available := self._available()):
            message = self._messages[0]
            if message.position < 0:
                self._pass_length(message, self._passed % len(self._bytes) // WORD)
                message.position = 0
                available -= WORD
                self._passed += WORD
            start = self._passed % len(self._bytes)
            nbytes = min(message.nbytes - message.position, available, self._part_bytes, len(self._bytes) - start)
            if nbytes:
                self._pass_bytes(message, start, nbytes)
            message.position += nbytes
            self._passed += rounded_up(nbytes, WORD)
            if message.is_done:
                self._messages.popleft()
            self._memory.announce(self._own_line, 0, self._passed)
        return self._passed != before

    def _peer_passed(self) -> int:
        return self._memory.announced(self._peer_line, 0)

    @abc.abstractmethod
    def _available(self) -> int:
        """Bytes that can pass, a multiple of `WORD`."""

    @abc.abstractmethod
    def _pass_length(self, message: Message, word: int) -> None:
        """Let a message's length pass at this word of the ring."""

    @abc.abstractmethod
    def _pass_bytes(self, message: Message, start: int, nbytes: int) -> None:
        """Let the next `nbytes` of a message pass at `start` of the ring."""


class Outgoing(ChannelEnd):
    """The sender's side."""

    @override
    def _available(self) -> int:
        return len(self._bytes) - (self._passed - self._peer_passed())

    @override
    def _pass_length(self, message: Message, word: int) -> None:
        self._words[word] = message.nbytes
        self._memory.synchronize_at(self._address + WORD * word, WORD)

    @override
    def _pass_bytes(self, message: Message, start: int, nbytes: int) -> None:
        self._bytes[start : start + nbytes] = message.raw[message.position : message.position + nbytes]
        self._memory.synchronize_at(self._address + start, nbytes)


class Incoming(ChannelEnd):
    """The receiver's side."""

    @override
    def _available(self) -> int:
        return self._peer_passed() - self._passed

    @override
    def _pass_length(self, message: Message, word: int) -> None:
        self._memory.synchronize_at(self._address + WORD * word, WORD)
        nbytes, room = int(self._words.item(word)), message.nbytes
        if nbytes > room:
            raise TransportError(
                f"a message of {nbytes} bytes from rank {self._peer} came for a buffer of {room} bytes"
            )
        message.nbytes = nbytes

    @override
    def _pass_bytes(self, message: Message, start: int, nbytes: int) -> None:
        self._memory.synchronize_at(self._address + start, nbytes)
        message.raw[message.position : message.position + nbytes] = self._bytes[start : start + nbytes]
