"""Ping servers: one small TCP port per rank, where others learn whether its process runs and its link is up.

The rendezvous store lies on one rank's machine. When that machine is lost the store is lost with it, and only a direct
connection can tell a rank whether the others are lost or it is itself cut off.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

_ANSWER = b"."
_RETRY_S = 0.1

Address = tuple[str, int]
"""(host, port)"""


class PingServer:
    """Answers whoever connects, in a thread of its own, until it is closed.

    Args:
        host: this machine's address; the port is any free one.

    Attributes:
        address: where others can connect.

    Raises:
        OSError: the machine gives no port at that address.
    """

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.address: Address = (host, self._server.getsockname()[1])
        self._closed = threading.Event()
        threading.Thread(target=self._answer, name="ping_server", daemon=True).start()

    def close(self) -> None:
        """Give the port back; whoever connects from now on is refused."""
        self._closed.set()
        with contextlib.suppress(OSError):  # wakes the thread on Linux; where it may not be called, closing does
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _answer(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._server.accept()
            except OSError:  # closed, or short of something that may be free again soon, such as open files
                self._closed.wait(_RETRY_S)
                continue
            with connection, contextlib.suppress(OSError):  # whoever connected may have left
                connection.sendall(_ANSWER)


def ping_all(addresses: Mapping[int, Address], within_s: float) -> dict[int, bool]:
    """By rank, whether its process answers; ranks whose machine is out of reach are left out.

    A machine is in reach also where it refuses the connection, or takes it for a process that was stopped.

    Args:
        addresses: where each rank's ping server is.
        within_s: longest wait for an answer.
    """
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        answers = list(pool.map(lambda address: _ping(address, within_s / 2), addresses.values()))
    return {rank: answer for rank, answer in zip(addresses, answers, strict=True) if answer is not None}


def _ping(address: Address, timeout_s: float) -> bool | None:
    """Whether the process answers; None where its machine is out of reach."""
    try:
        connection = socket.create_connection(address, timeout_s)
    except ConnectionRefusedError:
        return False
    except OSError:
        return None
    with connection, contextlib.suppress(OSError):  # silence, or a connection that is reset, is no answer
        return connection.recv(1) == _ANSWER
    return False


def own_host(meeting_point: str) -> str:
    """This machine's address as others see it: that from which it reaches the host where all ranks meet.

    Loopback where there is no way to it, as gloo has it: then no other machine takes part.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(meeting_point, 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
