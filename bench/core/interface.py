"""Read the kernel's counters of the bytes that a virtual host's network interface sent and received.

A virtual host is a network namespace with one interface beside the loopback, so the counters hold the traffic of the
job alone: payload, TCP/IP and Ethernet headers, acknowledgements, address resolution.

Source: Linux, `/proc/<pid>/net/dev` (proc_pid_net(5)); it counts whole Ethernet frames without their checksum.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

WireHeaders = Literal["exact", "estimated"]

# Set for every process on a virtual host to "exact" (the interface counts real frames) or "estimated".
WIRE_HEADERS_VARIABLE = "BENCH_WIRE_HEADERS"

# Largest Ethernet frame: 14 bytes of header and an MTU of 1500.
FRAME_BYTES = 1514
# Headers of a frame: Ethernet 14, IPv4 20, TCP 20 + 12 bytes of timestamps. A full frame carries 1448 bytes of payload.
FRAME_HEADER_BYTES = 66

# Counters of the calling thread's network namespace, which may differ from that of its process.
_COUNTERS = Path("/proc/thread-self/net/dev")


@dataclasses.dataclass(frozen=True)
class InterfaceBytes:
    """Bytes of Ethernet frames since the namespace was made, summed over all interfaces but the loopback."""

    sent: float
    received: float


def interface_bytes(headers: WireHeaders | None = None) -> InterfaceBytes:
    """Read the counters of the calling thread's network namespace; subtract two readings to count between them.

    Args:
        headers: "exact" returns the counters. "estimated" adds the headers that they miss with segmentation offload,
            which counts a packet of up to 64 kB with one header although a wire would carry it in 44 frames. None:
            the value of `WIRE_HEADERS_VARIABLE`, or "exact" if it is not set.
    """
    if headers is None:
        headers = "estimated" if os.environ.get(WIRE_HEADERS_VARIABLE) == "estimated" else "exact"
    return parse_counters(_COUNTERS.read_text(encoding="ascii"), headers)


class Counters:
    """The counters of the calling thread's current network namespace, for reading from any thread.

    Args:
        headers: as for `interface_bytes`.
    """

    def __init__(self, headers: WireHeaders) -> None:
        self._headers = headers
        self._file = _COUNTERS.open("rb", buffering=0)

    def read(self) -> InterfaceBytes:
        """Return the current values."""
        self._file.seek(0)
        return parse_counters(self._file.read().decode("ascii"), self._headers)

    def close(self) -> None:
        """Close the file of the counters."""
        self._file.close()


def parse_counters(text: str, headers: WireHeaders) -> InterfaceBytes:
    """Parse the text of `/proc/<pid>/net/dev`: two heading lines, then one line per interface."""
    sent = received = 0.0
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        if name.strip() != "lo":
            columns = [int(number) for number in numbers.split()]
            received += _on_the_wire(columns[0], columns[1], headers)
            sent += _on_the_wire(columns[8], columns[9], headers)
    return InterfaceBytes(sent=sent, received=received)


def _on_the_wire(num_bytes: int, num_packets: int, headers: WireHeaders) -> float:
    if headers == "exact":
        return num_bytes
    payload_bytes = num_bytes - FRAME_HEADER_BYTES * num_packets
    num_frames = payload_bytes / (FRAME_BYTES - FRAME_HEADER_BYTES)
    return num_bytes + FRAME_HEADER_BYTES * max(0.0, num_frames - num_packets)
