"""Rows of datagrams: what a lossy link carries and what it loses, which TCP's own rate would not show.

TCP takes a lost frame for a full link and slows down; datagrams go on at the rate at which they are sent. They are
counted on the interface, so that a processor too busy to read them is not taken for a lossy link.
"""

from __future__ import annotations

import dataclasses
import socket
import time
from typing import Self

from bench.core.errors import RunFailed
from bench.core.interface import FRAME_BYTES, interface_bytes

# At one loss in a hundred 20 are expected of each host.
_NUM_DATAGRAMS = 2000
_LEAST_S = 0.5
_UNLIMITED_BPS = 100e6
_HEADER_BYTES = 42  # Ethernet 14, IPv4 20, UDP 8
_LEAST_FRAME_BYTES = 60
_PACE_S = 1e-3
_SILENCE_S = 0.5


@dataclasses.dataclass(frozen=True)
class Row:
    """Equal datagrams, one after the other.

    Attributes:
        number: of datagrams.
        frame_bytes: of each as a whole frame.
        rate_bps: at which they are sent, frames counted whole.
    """

    number: int
    frame_bytes: int
    rate_bps: float

    @classmethod
    def at(cls, rate_bps: float | None) -> Self:
        """The row for links of this rate (not limited: 100 Mbit/s): half a second, on slow links longer."""
        rate_bps = rate_bps or _UNLIMITED_BPS
        num_bytes = rate_bps / 8 * _LEAST_S
        frame_bytes = min(max(int(num_bytes / _NUM_DATAGRAMS), _LEAST_FRAME_BYTES), FRAME_BYTES)
        return cls(max(_NUM_DATAGRAMS, int(num_bytes / frame_bytes)), frame_bytes, rate_bps)

    def send(self, address: str, port: int) -> None:
        """Send it to a port on which somebody listens, or need not."""
        payload = bytes(self.frame_bytes - _HEADER_BYTES)
        per_second = self.rate_bps / 8 / self.frame_bytes
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as source:
            source.connect((address, port))
            began, sent = time.perf_counter(), 0
            while sent < self.number:
                due = min(self.number, 1 + int((time.perf_counter() - began) * per_second))
                for _ in range(due - sent):
                    source.send(payload)
                sent = due
                time.sleep(_PACE_S)

    def receive(self, timeout_s: float) -> tuple[int, float]:
        """(datagrams that came, the rate in bits per second at which the row passed, losses included).

        Raises:
            RunFailed: none came.
        """
        before = interface_bytes("exact").received
        began = changed = time.perf_counter()
        first, last = None, before
        while (now := time.perf_counter()) - changed < (_SILENCE_S if first is not None else timeout_s):
            seen = interface_bytes("exact").received
            if seen > last:
                first, began = (seen, now) if first is None else (first, began)
                last, changed = seen, now
            time.sleep(_PACE_S)
        if first is None:
            raise RunFailed("no datagram came")
        num_received = round((last - before) / self.frame_bytes)
        share = num_received / self.number
        return num_received, 8 * (last - first) / share / max(changed - began, _PACE_S)


def ignoring(address: str, port: int) -> socket.socket:
    """A socket that lets datagrams come, and nobody reads: a closed port would answer each."""
    sink = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sink.bind((address, port))
    return sink
