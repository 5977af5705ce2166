"""A channel between rank 0 and another rank: a TCP connection for short messages; tensors use other connections."""

import contextlib
import dataclasses
import json
import math
import socket
import struct
import time
from typing import Any

from collectives.transport.base import Ledger, Purpose

_LENGTHS = struct.Struct("<IQ")  # lengths of a message's JSON text and of its body, in bytes
_STRANGERS_ROOM = 4096
_PART_BYTES = 1 << 18
# If the other machine loses its power or its link, the connection breaks after about a minute, or later if the other
# rank may go longer without taking a part of a message. While sent bytes are not acknowledged, the kernel sends no
# keep-alive probes. In this case, TCP_USER_TIMEOUT (milliseconds) ends the wait; it also ends a wait for room in a full
# buffer.
_SILENCE_S = 60.0
_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 3}


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembershipMessage:
    """A message on a channel: its kind, values that JSON can hold, and further bytes."""

    kind: str
    values: dict[str, Any]
    body: bytes = b""


class Channel:
    """One end of a TCP connection that carries messages; used from one thread.

    Args:
        sock: the connected socket.
        ledger: counts the messages that this rank sends.
        send_s: seconds within which the other rank must take a whole message.
        stall_s: longest time in seconds that the other rank may go without taking any part of a message.

    Attributes:
        is_trusted: False until the program at the other end has shown that it is a rank of the run; until then, long
            messages are refused.
    """

    def __init__(
        self, sock: socket.socket, ledger: Ledger, *, is_trusted: bool, send_s: float, stall_s: float = math.inf
    ) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        user_timeout = {"TCP_USER_TIMEOUT": round(1e3 * max(_SILENCE_S, min(send_s, stall_s)))}
        for name, value in (_KEEP_ALIVE | user_timeout).items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.sock = sock
        self.is_trusted = is_trusted
        self._ledger = ledger
        self._send_s, self._stall_s = send_s, stall_s
        self._received = bytearray()

    def send(self, kind: str, body: bytes = b"", *, purpose: Purpose | None = "control", **values: Any) -> None:
        """Send a message.

        Args:
            kind: what the message is about.
            body: bytes that follow the values.
            purpose: the purpose under which the message's bytes are counted; None for a message that is not part of
                training, whose bytes are not counted.
            values: values that JSON can hold.

        Raises:
            TimeoutError: the other rank did not take the message in time. Close the channel, because the next message
                would begin inside this one.
            OSError: the connection is broken.
        """
        text = json.dumps({"kind": kind} | values).encode()
        head = _LENGTHS.pack(len(text), len(body)) + text
        if purpose is not None:
            self._ledger.traffic[purpose].messages += 1
            self._ledger.traffic[purpose].nbytes += len(head) + len(body)
        limit = time.monotonic() + self._send_s
        for part in (memoryview(head), memoryview(body)):
            while part:
                self.sock.settimeout(max(1e-3, min(self._stall_s, limit - time.monotonic())))
                part = part[self.sock.send(part) :]

    def receive(self) -> MembershipMessage:
        """Return the next message; block until it has arrived.

        Raises:
            OSError: the connection is broken, or the other rank has closed it.
        """
        self.sock.settimeout(None)
        while (message := self._next()) is None:
            self._read()
        return message

    def arrived(self) -> list[MembershipMessage]:
        """Read what has arrived on a readable socket, and return the messages that are complete.

        Raises:
            OSError: the connection is broken, or the other rank has closed it.
            ValueError: the received bytes are not a message of a `Channel`.
        """
        self.sock.settimeout(0)
        with contextlib.suppress(BlockingIOError):  # nothing has arrived
            self._read()
        messages = []
        while (message := self._next()) is not None:
            messages.append(message)
        return messages

    def close(self) -> None:
        """Close the connection; the kernel still delivers what was sent."""
        self.sock.close()

    def _read(self) -> None:
        part = self.sock.recv(_PART_BYTES)
        if not part:
            raise ConnectionResetError("the other rank has closed the connection")
        self._received += part

    def _next(self) -> MembershipMessage | None:
        if len(self._received) < _LENGTHS.size:
            return None
        text_bytes, body_bytes = _LENGTHS.unpack_from(self._received)
        start, end = _LENGTHS.size + text_bytes, _LENGTHS.size + text_bytes + body_bytes
        if end > _STRANGERS_ROOM and not self.is_trusted:
            raise ValueError("the message is too long for a greeting")
        if len(self._received) < end:
            return None
        values = json.loads(self._received[_LENGTHS.size : start])
        if not isinstance(values, dict) or not isinstance(kind := values.pop("kind", None), str):
            raise ValueError("the message has no kind")
        message = MembershipMessage(kind=kind, values=values, body=bytes(self._received[start:end]))
        del self._received[:end]
        return message
