"""Ping servers: one small TCP port per rank, where others learn whether its process runs and its link is up.

The rendezvous store lies on one rank's machine. When that machine is lost the store is lost with it, and only a direct
connection can tell a rank whether the others are lost or it is itself cut off.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Mapping

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


def start_ping_server() -> PingServer | None:
    """This process's ping server; None where the job has no meeting point or the machine no port to spare.

    Its address is the one that this machine uses towards the job's `MASTER_ADDR`, so the others can reach it.
    """
    host = _own_host()
    try:
        return None if host is None else PingServer(host)
    except OSError:
        return None  # it only serves to explain failures, so its absence is not one


def ping_all(addresses: Mapping[int, Address], within_s: float) -> dict[int, bool]:
    """By rank, whether its process answers; ranks whose machine is out of reach are left out.

    A machine is in reach also where it refuses the connection, or takes it for a process that was stopped.

    Args:
        addresses: where each rank's ping server is.
        within_s: longest wait for an answer.
    """
    answers: dict[int, bool] = {}

    def ping(rank: int, address: Address) -> None:
        try:
            with socket.create_connection(address, timeout=within_s / 2) as connection:
                answers[rank] = False
                answers[rank] = connection.recv(1) == _ANSWER
        except ConnectionRefusedError:
            answers[rank] = False
        except OSError:
            return  # out of reach, or silent: which is what the caller wants to know

    threads = [threading.Thread(target=ping, args=item, daemon=True) for item in addresses.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def _own_host() -> str | None:
    master, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not master or not port:
        return None
    try:
        family, kind, _, _, address = socket.getaddrinfo(master, int(port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None  # no way to the meeting point: the store's own error says so
