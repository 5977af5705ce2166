"""Meeting: how ranks come to have a TCP connection to each other, and nobody else to any of them.

Every rank listens for as long as it takes, on the interface that gloo would use, and leaves address and a random token
in the rendezvous store. Who connects says the token of the rank that it wants, and its own number; the answer is its
own token, which only a rank that reads the same store can know. Whoever says anything else is hung up on.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import struct
import time
from datetime import timedelta
from typing import Self

import psutil
from torch.distributed.distributed_c10d import Store

_TOKEN_BYTES = 32
_GREETING = struct.Struct(f"<{_TOKEN_BYTES}sI")
_BACKLOG = 128
_MOST_STRANGERS = 64


class MeetingError(RuntimeError):
    """A rank did not come, or could not be reached; `rank` says which."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


def interface_host(otherwise: str) -> str:
    """This machine's address on the interface that `GLOO_SOCKET_IFNAME` names, the first of several."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    addresses = psutil.net_if_addrs().get(name, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for found in addresses:
            if found.family == family:
                return str(found.address)
    return otherwise


def connect_all(store: Store, rank: int, world_size: int, host: str, timeout_s: float) -> dict[int, socket.socket]:
    """Connect to every other rank; all must call.

    Args:
        store: shared by these ranks, and used for no other meeting.
        rank: this one, 0..world_size-1.
        world_size: number of ranks.
        host: this machine's address as others see it; nothing listens anywhere else, and nothing any more at the end.
        timeout_s: longest wait.

    Returns:
        Connected sockets, by rank.

    Raises:
        MeetingError: a rank did not come in time, or cannot be reached.
        OSError: the machine gives no port at that address.
    """
    deadline = time.monotonic() + timeout_s
    token = secrets.token_bytes(_TOKEN_BYTES)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    met: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as if_it_fails:
        with socket.create_server((host, 0), family=family, backlog=_BACKLOG) as listener:
            store.set(str(rank), json.dumps([*listener.getsockname()[:2], token.hex()]))
            for peer in range(rank):
                met[peer] = if_it_fails.enter_context(_connect(store, peer, deadline, rank))
            tokens = {peer: _entry(store, peer, deadline)[1] for peer in range(rank + 1, world_size)}
            with _Acceptor(listener, token, tokens, if_it_fails) as door:
                met |= door.admit(deadline)
        for peer in range(rank):
            _await_answer(met[peer], peer, token, deadline)
        if_it_fails.pop_all()
    return met


def _entry(store: Store, peer: int, deadline: float) -> tuple[tuple[str, int], bytes]:
    """(address, token) of a rank, as soon as it has left them."""
    try:
        store.wait([str(peer)], timedelta(seconds=_seconds_to(deadline)))
    except RuntimeError as error:
        raise MeetingError(peer, str(error)) from error
    host, port, token = json.loads(store.get(str(peer)))
    return (host, port), bytes.fromhex(token)


def _connect(store: Store, peer: int, deadline: float, rank: int) -> socket.socket:
    """A connection to a rank that has been told who is there."""
    address, token = _entry(store, peer, deadline)
    try:
        sock = socket.create_connection(address, _seconds_to(deadline))
    except OSError as error:
        raise MeetingError(peer, str(error)) from error
    with contextlib.suppress(OSError):  # who hangs up gives no answer either
        sock.send(_GREETING.pack(token, rank))  # into an empty buffer
    return sock


def _await_answer(sock: socket.socket, peer: int, token: bytes, deadline: float) -> None:
    """Hear from whoever accepted that it is the rank that was meant."""
    answer = b""
    try:
        while len(answer) < _TOKEN_BYTES:
            sock.settimeout(_seconds_to(deadline))
            if not (part := sock.recv(_TOKEN_BYTES - len(answer))):
                raise ConnectionResetError("the connection was closed")
            answer += part
    except OSError as error:
        raise MeetingError(peer, str(error)) from error
    if not hmac.compare_digest(answer, token):
        raise MeetingError(peer, "somebody else answers at its address")


class _Acceptor:
    """Lets in the ranks that are expected, whatever strangers do meanwhile.

    Args:
        listener: where they come.
        token: what they must say.
        expected: what is answered, by rank.
        if_it_fails: closes who was admitted.
    """

    def __init__(
        self, listener: socket.socket, token: bytes, expected: dict[int, bytes], if_it_fails: contextlib.ExitStack
    ) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._token = token
        self._expected = expected
        self._if_it_fails = if_it_fails
        self._admitted: dict[int, socket.socket] = {}
        self._said: dict[socket.socket, bytes] = {}  # by who has not said all, the oldest first
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def admit(self, deadline: float) -> dict[int, socket.socket]:
        """Sockets of all that are expected, by rank."""
        while missing := self._expected.keys() - self._admitted.keys():
            events = self._selector.select(_seconds_to(deadline))
            if time.monotonic() >= deadline:
                raise MeetingError(min(missing), "it did not connect")
            for key, _ in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj in self._said:
                    self._listen_to(key.fileobj)
        return self._admitted

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for sock in list(self._said):
            self._hang_up(sock)
        self._selector.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # whoever it was has left
            return
        sock.setblocking(False)
        self._said[sock] = b""
        self._selector.register(sock, selectors.EVENT_READ)
        if len(self._said) > _MOST_STRANGERS + len(self._expected):
            self._hang_up(next(iter(self._said)))

    def _listen_to(self, sock: socket.socket) -> None:
        try:
            part = sock.recv(_GREETING.size - len(self._said[sock]))
        except OSError:
            part = b""
        said = self._said[sock] = self._said[sock] + part
        if not part:
            self._hang_up(sock)
        elif len(said) == _GREETING.size:
            self._judge(sock, *_GREETING.unpack(said))

    def _judge(self, sock: socket.socket, token: bytes, rank: int) -> None:
        """Let in who knows the token and is expected."""
        if not hmac.compare_digest(token, self._token) or rank not in self._expected.keys() - self._admitted.keys():
            self._hang_up(sock)
            return
        del self._said[sock]
        self._selector.unregister(sock)
        sock.setblocking(True)
        with contextlib.suppress(OSError):  # whoever has left is missed later
            sock.sendall(self._expected[rank])
        self._admitted[rank] = self._if_it_fails.enter_context(sock)

    def _hang_up(self, sock: socket.socket) -> None:
        del self._said[sock]
        self._selector.unregister(sock)
        sock.close()


def _seconds_to(deadline: float) -> float:
    return max(1e-3, deadline - time.monotonic())
