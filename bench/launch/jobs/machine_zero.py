"""Check from the other machines of a run whether machine 0 still runs its part of the job."""

from __future__ import annotations

import socket
import time

from bench.core.config.endpoint import Endpoint

ASK_EVERY_S = 5.0
ANSWER_WITHIN_S = 2.0


class MachineZero:
    """Connects to machine 0 from time to time.

    Args:
        endpoint: HOST:PORT at which torchrun's agent on machine 0 listens as long as it runs.
    """

    def __init__(self, endpoint: str) -> None:
        zero = Endpoint.parse(endpoint)
        self._address = (zero.host, zero.port)
        self._last_try = -ASK_EVERY_S

    def is_heard(self) -> bool:
        """Return whether a connection was made just now; False without a try if the last one was shortly before."""
        now = time.monotonic()
        if now - self._last_try < ASK_EVERY_S:
            return False
        self._last_try = now
        try:
            socket.create_connection(self._address, ANSWER_WITHIN_S).close()
        except OSError:
            return False
        return True
