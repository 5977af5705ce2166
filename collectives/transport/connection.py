"""Connection: messages both ways between two ranks over one TCP socket, moved when asked and never by a thread.

On the wire a message is its length, 8 bytes with the lowest first, and its bytes. A receiver lets the kernel wake it
when the length has come and then, by the socket's low-water mark, only when the rest has: a wake-up per packet would
cost more than the copy. Of a long message it takes parts, so that copying goes on while the next part comes.
"""

from __future__ import annotations

import collections
import contextlib
import select
import socket
import struct

import numpy as np
import torch

_LENGTH = struct.Struct("<Q")
_LONG_BYTES, _PART_BYTES = 1 << 20, 1 << 16
_NOTHING = np.empty(0, dtype=np.uint8)


class Outgoing:
    """A message that leaves; holds its tensor until the kernel has all of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        body = _bytes_of(tensor)
        self._left = [memoryview(_LENGTH.pack(len(body))), body]

    @property
    def is_done(self) -> bool:
        """Whether the kernel has all of it."""
        return not self._left

    def move(self, sock: socket.socket) -> bool:
        """Hand over what the kernel takes; returns whether it has all of it now. Raises as a socket does."""
        sent = sock.sendmsg(self._left)
        while self._left and sent >= len(self._left[0]):
            sent -= len(self._left.pop(0))
        if self._left:
            self._left[0] = self._left[0][sent:]
        return self.is_done


class Incoming:
    """A message that arrives.

    Args:
        room: longest message that may come, in bytes.
        tensor: what it fills from the front; memory of just its length where None.
    """

    def __init__(self, room: int, tensor: torch.Tensor | None = None) -> None:
        self._tensor = tensor
        self._memory = _NOTHING
        self._room = room
        self._length = bytearray(_LENGTH.size)
        self._left = memoryview(self._length)
        self._has_length = False

    @property
    def tensor(self) -> torch.Tensor:
        """As given; else uint8 1-D, empty until the length is known."""
        return torch.from_numpy(self._memory) if self._tensor is None else self._tensor

    @property
    def is_done(self) -> bool:
        """Whether all of it is there."""
        return self._has_length and not self._left

    @property
    def num_missing(self) -> int:
        """Bytes of what is being read, the length or the body, that have not come."""
        return len(self._left)

    def move(self, sock: socket.socket) -> bool:
        """Take what the kernel has; returns whether all of it is there now.

        Raises:
            BlockingIOError: the kernel has nothing.
            ConnectionError: the peer has closed the connection.
            OverflowError: the message is longer than the room for it.
        """
        while self._left:
            count = sock.recv_into(self._left)
            if not count:
                raise ConnectionResetError("the peer has closed the connection")
            self._left = self._left[count:]
            if self._left:  # the kernel gave all that it had: asked again, it would say so
                break
            if not self._has_length:
                self._has_length = True
                self._left = self._body()
        return self.is_done

    def _body(self) -> memoryview:
        (length,) = _LENGTH.unpack(self._length)
        if length > self._room:
            raise OverflowError(f"{length} bytes where this rank has room for {self._room}")
        if self._tensor is not None:
            return _bytes_of(self._tensor)[:length]
        # By numpy: right after a wake-up torch, of which no cache holds anything, takes thirty times as long as usual.
        self._memory = np.empty(length, dtype=np.uint8)
        return self._memory.data


class Connection:
    """One rank's end of a connected socket, and the messages under way on it, each way in their order."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._outgoing: collections.deque[Outgoing] = collections.deque()
        self._incoming: collections.deque[Incoming] = collections.deque()
        self._low_water = 1

    def fileno(self) -> int:
        """The socket's descriptor; -1 once it is closed."""
        return self._socket.fileno()

    def send(self, message: Outgoing) -> None:
        """Queue a message, and let leave what can; raises as `move` does."""
        self._outgoing.append(message)
        self._move_out()

    def receive(self, message: Incoming) -> None:
        """Expect a message after those expected before."""
        self._incoming.append(message)

    def under_way(self) -> list[Outgoing | Incoming]:
        """What has not left, and what has not come."""
        return [*self._outgoing, *self._incoming]

    def events(self) -> int:
        """What to poll the socket for, which becomes readable no sooner than what is being read is there."""
        if self._incoming:
            missing = self._incoming[0].num_missing
            low_water = missing if missing <= _LONG_BYTES else _PART_BYTES
            if low_water != self._low_water:
                self._low_water = low_water
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, low_water)
        return (select.POLLIN if self._incoming else 0) | (select.POLLOUT if self._outgoing else 0)

    def move(self, events: int) -> None:
        """Move what the poll said can be moved.

        Raises:
            OSError: the connection is broken, or the peer has closed it.
            OverflowError: a message is longer than the room for it.
        """
        if events & ~select.POLLOUT:
            self._move_in()
        if events & ~select.POLLIN:
            self._move_out()

    def close(self) -> None:
        """Give the socket back; the kernel still delivers what it has taken."""
        self._socket.close()

    def _move_out(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the kernel's buffer is full
            while self._outgoing and self._outgoing[0].move(self._socket):
                self._outgoing.popleft()

    def _move_in(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the rest is on its way
            while self._incoming and self._incoming[0].move(self._socket):
                self._incoming.popleft()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's own memory."""
    if tensor.dtype != torch.uint8 or tensor.dim() != 1:  # what is packed need not be looked at in another way
        tensor = tensor.detach().view(-1).view(torch.uint8)
    return tensor.numpy().data
