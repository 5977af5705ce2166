"""Doorbells: one small TCP port per rank, at which others hear whether its process runs and its link is up.

The rendezvous store lies on one rank's machine. When that machine is lost the store is lost with it, and only a direct
connection can tell a rank whether the others are lost or it is itself cut off.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping

_ANSWER = b"."

Address = tuple[str, int]
"""(host, port)"""


def open_doorbell() -> Address | None:
    """Answer from now on, in a thread of its own; returns where, or None where the job has no meeting point.

    The address is the one that this machine uses towards the job's `MASTER_ADDR`, so the others can reach it.
    """
    host = _own_host()
    if host is None:
        return None
    server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    threading.Thread(target=_answer, args=(server,), name="doorbell", daemon=True).start()
    return host, server.getsockname()[1]


def ring_all(addresses: Mapping[int, Address], within_s: float) -> set[int]:
    """The ranks that answer; takes at most about `within_s` seconds.

    Args:
        addresses: where each rank's doorbell is.
        within_s: longest wait for an answer.
    """
    answered: set[int] = set()

    def ring(rank: int, address: Address) -> None:
        try:
            with socket.create_connection(address, timeout=within_s / 2) as connection:
                connection.settimeout(within_s / 2)
                if connection.recv(1) == _ANSWER:
                    answered.add(rank)
        except OSError:
            return  # out of reach, which is what the caller wants to know

    threads = [threading.Thread(target=ring, args=item, daemon=True) for item in addresses.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answered


def _answer(server: socket.socket) -> None:
    while True:
        connection, _ = server.accept()
        with connection:
            try:
                connection.sendall(_ANSWER)
            except OSError:
                continue  # whoever rang has left


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
