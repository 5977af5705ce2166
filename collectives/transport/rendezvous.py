"""Rendezvous: open a TCP connection between every two ranks, and refuse connections from other programs.

Every rank listens on the interface that gloo would use, only until all ranks are connected. It writes its address and a
random token into the rendezvous store. A rank that connects to another rank sends the other rank's token and its own
number. The other rank answers with the caller's token. Only ranks with access to the store know the tokens; a
connection that sends anything else is closed.
"""

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from datetime import timedelta

import psutil
from torch.distributed.distributed_c10d import Store

from collectives.transport.base import TransportError

_TOKEN_BYTES = 32
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_MOST_STRANGERS = 64


def interface_host(otherwise: str) -> str:
    """Return this machine's address on the first interface in GLOO_SOCKET_IFNAME; `otherwise` if there is none."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    found = psutil.net_if_addrs().get(name, [])
    families = socket.AF_INET, socket.AF_INET6
    return next((str(each.address) for family in families for each in found if each.family == family), otherwise)


def connect_all(store: Store, rank: int, world_size: int, host: str, timeout_s: float) -> dict[int, socket.socket]:
    """Connect this rank to every other rank by TCP. Every rank must call this function.

    Args:
        store: rendezvous store that only these ranks use, and only for this rendezvous.
        rank: number of this rank, 0..world_size-1.
        world_size: number of ranks.
        host: this machine's address as other machines see it; this rank listens there until all ranks are connected.
        timeout_s: longest time until all ranks are connected, in seconds.

    Returns:
        The connected socket to each other rank, by rank.

    Raises:
        TransportError: a rank did not connect in time, or cannot be reached.
        OSError: this machine cannot listen at that address.
    """
    deadline = time.monotonic() + timeout_s
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as if_it_fails:
        with socket.create_server((host, 0), family=family, backlog=128) as listener:
            store.set(str(rank), json.dumps([*listener.getsockname()[:2], token.hex()]))
            sockets = {peer: if_it_fails.enter_context(_connect(store, peer, deadline, rank)) for peer in range(rank)}
            tokens = {peer: _entry(store, peer, deadline)[1] for peer in range(rank + 1, world_size)}
            for peer, sock in _Acceptor(listener, token, tokens).accept_all(deadline):
                sockets[peer] = if_it_fails.enter_context(sock)
        for peer in range(rank):
            _await_answer(sockets[peer], peer, token, deadline)
        if_it_fails.pop_all()
    return sockets


def _entry(store: Store, peer: int, deadline: float) -> tuple[tuple[str, int], bytes]:
    try:
        store.wait([str(peer)], timedelta(seconds=_seconds_to(deadline)))
    except RuntimeError as error:
        raise TransportError(str(error), lost_rank=peer) from error
    host, port, token = json.loads(store.get(str(peer)))
    return (host, port), bytes.fromhex(token)


def _connect(store: Store, peer: int, deadline: float, rank: int) -> socket.socket:
    address, token = _entry(store, peer, deadline)
    try:
        sock = socket.create_connection(address, _seconds_to(deadline))
    except OSError as error:
        raise TransportError(str(error), lost_rank=peer) from error
    with contextlib.suppress(OSError):  # if the peer has closed the connection, `_await_answer` raises
        sock.send(_GREETING.pack(token, rank))  # cannot block: the send buffer is empty
    return sock


def _await_answer(sock: socket.socket, peer: int, token: bytes, deadline: float) -> None:
    """Wait until the peer answers with this rank's own token, which proves that the peer can read the store."""
    answer = b""
    try:
        while len(answer) < _TOKEN_BYTES:
            sock.settimeout(_seconds_to(deadline))
            if not (part := sock.recv(_TOKEN_BYTES - len(answer))):
                raise ConnectionResetError("the connection was closed")
            answer += part
    except OSError as error:
        raise TransportError(str(error), lost_rank=peer) from error
    if not hmac.compare_digest(answer, token):
        raise TransportError("another program answers at its address", lost_rank=peer)


class _Acceptor:
    """Accept connections of the expected ranks, and close those of other programs.

    Args:
        listener: the listening socket.
        token: token of this rank, which ranks that connect must send.
        expected: for each expected rank, the token with which to answer it.
    """

    def __init__(self, listener: socket.socket, token: bytes, expected: dict[int, bytes]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._token = token
        self._missing = dict(expected)
        self._received: dict[socket.socket, bytes] = {}  # incomplete greetings, the oldest connection first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def accept_all(self, deadline: float) -> Iterator[tuple[int, socket.socket]]:
        """Yield each expected rank and its connected socket, in the order in which ranks connect.

        Raises:
            TransportError: a rank did not connect in time.
        """
        try:
            while self._missing:
                events = self._selector.select(_seconds_to(deadline))
                if time.monotonic() >= deadline:
                    raise TransportError("it did not connect", lost_rank=min(self._missing))
                for sock in [key.fileobj for key, _ in events]:
                    if sock is self._listener:
                        self._accept()
                    elif isinstance(sock, socket.socket) and (rank := self._receive(sock)) is not None:
                        yield rank, sock
        finally:
            for sock in list(self._received):
                self._hang_up(sock)
            self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # the connection is already closed
            return
        sock.setblocking(False)
        self._received[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._received) > _MOST_STRANGERS + len(self._missing):
            self._hang_up(next(iter(self._received)))

    def _receive(self, sock: socket.socket) -> int | None:
        """Read a part of the greeting that a connected program sends.

        If the greeting is complete and comes from an expected rank, answer it and return the rank. If it is complete
        but wrong, close the socket. In all other cases return None.
        """
        if sock not in self._received:  # another event has closed it since it became readable
            return None
        try:
            part = sock.recv(_GREETING.size - len(self._received[sock]))
        except OSError:
            part = b""
        greeting = self._received[sock] = self._received[sock] + part
        if part and len(greeting) < _GREETING.size:
            return None
        if part:
            token, rank = _GREETING.unpack(greeting)
            if hmac.compare_digest(token, self._token) and rank in self._missing:
                del self._received[sock]
                self._selector.unregister(sock)
                sock.setblocking(True)
                with contextlib.suppress(OSError):  # if the rank has left, the first message to it fails
                    sock.sendall(self._missing.pop(rank))
                return int(rank)
        self._hang_up(sock)
        return None

    def _hang_up(self, sock: socket.socket) -> None:
        del self._received[sock]
        self._selector.unregister(sock)
        sock.close()


def _seconds_to(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())
