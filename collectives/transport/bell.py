"""A bell: one thread rings it so that another's wait for messages ends before they have come."""

from __future__ import annotations

import contextlib
import select
import socket

_AT_ONCE = 64


class Bell:
    """Rung until it is silenced, however often and whenever it was rung; can be polled as a socket."""

    def __init__(self) -> None:
        self._rung, self._ringer = socket.socketpair()
        for end in (self._rung, self._ringer):
            end.setblocking(False)

    def fileno(self) -> int:
        """A descriptor that is readable while the bell rings; -1 once it is closed."""
        return self._rung.fileno()

    def ring(self) -> None:
        """From any thread."""
        with contextlib.suppress(BlockingIOError):  # it rings already, and nobody has listened for long
            self._ringer.send(b"\0")

    def silence(self) -> None:
        """What was handed over before any ring until now is to be looked for afterwards."""
        with contextlib.suppress(BlockingIOError):
            while self._rung.recv(_AT_ONCE):
                pass

    @property
    def is_ringing(self) -> bool:
        """Whether it was rung since it was silenced."""
        poll = select.poll()
        poll.register(self._rung, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        """It cannot ring afterwards."""
        self._rung.close()
        self._ringer.close()
