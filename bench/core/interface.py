"""What the kernel counted: bytes that a virtual host's network interface sent and received.

A virtual host is a network namespace with one interface beside the loopback, so the interface's counters are the
job's traffic and nothing else: payload, TCP/IP and Ethernet headers, acknowledgements, address resolution.
Source: Linux, `/proc/<pid>/net/dev` (proc_pid_net(5)); counted is the whole Ethernet frame without its checksum.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal

WireHeaders = Literal["exact", "estimated"]

# Set for every process on a virtual host: whether the interface's counters see real frames.
WIRE_HEADERS_VARIABLE = "BENCH_WIRE_HEADERS"

# Largest Ethernet frame: 14 bytes of header and an MTU of 1500.
FRAME_BYTES = 1514
# Ethernet 14, IPv4 20, TCP 20 with 12 bytes of timestamps: a full frame carries 1448 bytes.
FRAME_HEADER_BYTES = 66

# The calling thread's own namespace; for a process that never changed it, the same as /proc/self/net/dev.
_COUNTERS = Path("/proc/thread-self/net/dev")


@dataclasses.dataclass(frozen=True)
class InterfaceBytes:
    """Bytes of whole frames, all interfaces but the loopback together, since the namespace was made."""

    sent: float
    received: float


def interface_bytes(headers: WireHeaders | None = None) -> InterfaceBytes:
    """Read the counters of the calling thread's network namespace; subtract two readings to count between them.

    Args:
        headers: "exact" returns the counters. "estimated" adds the headers that segmentation offload keeps from them:
            with offload one packet of up to 64 kB is counted with one header where a wire carries 44 frames. None:
            what the environment of a virtual host says, "exact" without it.
    """
    if headers is None:
        headers = "estimated" if os.environ.get(WIRE_HEADERS_VARIABLE) == "estimated" else "exact"
    return parse_counters(_COUNTERS.read_text(encoding="ascii"), headers)


class Counters:
    """The counters of the network namespace in which the calling thread is now, to be read from any thread.

    Args:
        headers: as of `interface_bytes`.
    """

    def __init__(self, headers: WireHeaders) -> None:
        self._headers = headers
        self._file = _COUNTERS.open("rb", buffering=0)

    def read(self) -> InterfaceBytes:
        """What they say now."""
        self._file.seek(0)
        return parse_counters(self._file.read().decode("ascii"), self._headers)

    def close(self) -> None:
        """They cannot be read afterwards."""
        self._file.close()


def parse_counters(text: str, headers: WireHeaders) -> InterfaceBytes:
    """Read the format of `/proc/<pid>/net/dev`: two heading lines, then one line per interface."""
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
