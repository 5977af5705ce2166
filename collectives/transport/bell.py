"""A bell: one thread rings it so that another's wait for messages ends before they have come."""

from __future__ import annotations

import contextlib
import socket

_AT_ONCE = 64


class Bell:
    """Rung until it is silenced, however often and whenever it was rung; can be polled as a socket.

    Attributes:
        is_ringing: whether it was rung since it was silenced; for who asks often, no question to the kernel.
    """

    def __init__(self) -> None:
        self.is_ringing = False
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
        self.is_ringing = True  # behind the byte: whoever silences it in between finds it ringing for nothing, at worst

    def silence(self) -> None:
        """What was handed over before any ring until now is to be looked for afterwards."""
        if not self.is_ringing:
            return
        self.is_ringing = False
        with contextlib.suppress(BlockingIOError):
            while self._rung.recv(_AT_ONCE):
                pass

    def close(self) -> None:
        """It cannot ring afterwards."""
        self._rung.close()
        self._ringer.close()
