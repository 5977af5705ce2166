"""Machine 0 as the other machines of a run see it: there, as long as its meeting point answers."""

from __future__ import annotations

import socket
import time

from bench.core.config.endpoint import Endpoint

ASK_EVERY_S = 5.0
ANSWER_WITHIN_S = 2.0


class MachineZero:
    """Asks the meeting point once in a while whether it is still there.

    Args:
        endpoint: HOST:PORT, where torchrun's agent on machine 0 listens from its start to its end.
    """

    def __init__(self, endpoint: str) -> None:
        zero = Endpoint.parse(endpoint)
        self._address = (zero.host, zero.port)
        self._asked = -ASK_EVERY_S

    def is_heard(self) -> bool:
        """Whether it answered just now; False between two questions."""
        now = time.monotonic()
        if now - self._asked < ASK_EVERY_S:
            return False
        self._asked = now
        try:
            socket.create_connection(self._address, ANSWER_WITHIN_S).close()
        except OSError:
            return False
        return True
