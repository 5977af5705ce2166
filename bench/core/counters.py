"""Read the kernel's counters during training: bytes sent and received, and CPU time of other processes.

The other processes are other programs, and the forwarder that passes frames between virtual hosts.
A virtual host is a network namespace with one interface beside the loopback, so the interface's counters hold only the
job's traffic: payload, TCP/IP and Ethernet headers, acknowledgements, address resolution.

Source: Linux, `/proc/<pid>/net/dev` (proc_pid_net(5)), which counts whole Ethernet frames without their checksum;
`/proc/stat` and `/proc/<pid>/stat` (proc_stat(5), proc_pid_stat(5)), in steps of 10 ms.
"""

import abc
import contextlib
import dataclasses
import os
import time
from pathlib import Path
from typing import Literal

import psutil
from typing_extensions import override

WireHeaders = Literal["exact", "estimated"]

# Environment variable of every process on a virtual host: "exact" (the interface counts real frames) or "estimated".
WIRE_HEADERS_VARIABLE = "BENCH_WIRE_HEADERS"

# Largest Ethernet frame: 14 bytes of header and an MTU of 1500.
FRAME_BYTES = 1514
# Headers of a frame: Ethernet 14, IPv4 20, TCP 20 + 12 bytes of timestamps. A full frame carries 1448 bytes of payload.
FRAME_HEADER_BYTES = 66

# Counters of the calling thread's network namespace. The thread may be in another namespace than its process.
_COUNTERS = Path("/proc/thread-self/net/dev")


@dataclasses.dataclass(frozen=True)
class InterfaceBytes:
    """Bytes of Ethernet frames since the network namespace was made, summed over all interfaces except loopback."""

    sent: float
    received: float


def interface_bytes(headers: WireHeaders | None = None) -> InterfaceBytes:
    """Return the bytes sent and received so far in the calling thread's network namespace.

    The difference of two readings is the traffic between them.

    Args:
        headers: "exact" returns the kernel's counters. "estimated" adds the headers that the counters miss with
            segmentation offload: the kernel counts a packet of up to 64 kB with one header, although a wire would carry
            the packet in 44 frames. None uses the value of the environment variable `WIRE_HEADERS_VARIABLE`, or "exact"
            if the variable is not set.
    """
    if headers is None:
        headers = "estimated" if os.environ.get(WIRE_HEADERS_VARIABLE) == "estimated" else "exact"
    return parse_counters(_COUNTERS.read_text(encoding="ascii"), headers)


class Counters:
    """The byte counters of the network namespace of the thread that creates the object; any thread can read them.

    Args:
        headers: "exact" or "estimated", as in `interface_bytes`.
    """

    def __init__(self, headers: WireHeaders) -> None:
        self._headers = headers
        self._file = _COUNTERS.open("rb", buffering=0)

    def read(self) -> InterfaceBytes:
        """Return the bytes sent and received so far."""
        self._file.seek(0)
        return parse_counters(self._file.read().decode("ascii"), self._headers)

    def close(self) -> None:
        """Close the file from which the counters are read."""
        self._file.close()


def parse_counters(text: str, headers: WireHeaders) -> InterfaceBytes:
    """Return the bytes in a text of `/proc/<pid>/net/dev`, which has two heading lines, then a line per interface."""
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
    num_frames = (num_bytes - FRAME_HEADER_BYTES * num_packets) / (FRAME_BYTES - FRAME_HEADER_BYTES)
    return num_bytes + FRAME_HEADER_BYTES * max(0.0, num_frames - num_packets)


# If other programs use a larger share of the cores' time, the user is warned. On an idle machine they use less.
NOTEWORTHY_SHARE = 0.1


class CpuUse(abc.ABC):
    """Measures the CPU time used between calls of `start` and `stop`, added up over all such intervals.

    Attributes:
        cpu_s: CPU seconds used in all intervals together.
        wall_s: CPU seconds that were available in all intervals together.
    """

    cpu_s = 0.0
    wall_s = 0.0
    _began: tuple[float, float] | None = None

    @abc.abstractmethod
    def _read(self) -> tuple[float, float] | None:
        """Return (CPU seconds used, CPU seconds available) since a fixed time; None if there is nothing to count."""

    def start(self) -> None:
        """Begin an interval."""
        self._began = self._read()

    def stop(self) -> None:
        """End the interval."""
        if self._began is not None and (now := self._read()) is not None:
            self.cpu_s += now[0] - self._began[0]
            self.wall_s += now[1] - self._began[1]

    @property
    def share(self) -> float | None:
        """Return the share of the available CPU time that was used; None if no interval was measured."""
        return self.cpu_s / self.wall_s if self.wall_s > 0.0 else None


class OtherWork(CpuUse):
    """CPU time of programs outside the run, on the cores that this process may use; `share` is from 0 to 1.

    Args:
        root: process id of the run's first process; its descendants are part of the run.
    """

    def __init__(self, root: int) -> None:
        self._root = root

    @override
    def _read(self) -> tuple[float, float]:
        """Return (CPU seconds of programs outside the run, total seconds of the usable cores), both since boot."""
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        cores = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in usable]
        # steal: used by other virtual machines
        busy_s = sum(getattr(core, name, 0.0) for core in cores for name in ("user", "system", "nice", "steal"))
        waiting_s = sum(getattr(core, name, 0.0) for core in cores for name in ("idle", "iowait", "irq", "softirq"))
        own_s = 0.0
        with contextlib.suppress(psutil.Error):
            first = psutil.Process(self._root)
            for process in (first, *first.children(recursive=True)):
                with contextlib.suppress(psutil.Error):  # if it has just ended, its parent's times include its own
                    own_s += sum(process.cpu_times()[:4])  # user and system times of the process and its ended children
        return busy_s - own_s, busy_s + waiting_s

    @property
    @override
    def share(self) -> float | None:
        share = super().share
        return None if share is None else min(1.0, max(0.0, share))


def launcher_of_rank() -> int:
    """Return the process id of the launcher, which is the parent of this rank's parent process."""
    above = psutil.Process().parents()[:2]
    return int(above[-1].pid) if above else os.getpid()


# Environment variable of every process on a virtual host, if there is a forwarder: path below /proc of the forwarder's
# thread.
FORWARDER_VARIABLE = "BENCH_FORWARDER_TASK"

_UTIME, _STIME = 11, 12  # fields of /proc/.../stat after the process's name, which ends with the last bracket


def forwarder_cpu_s() -> float | None:
    """Return the CPU seconds used so far by the forwarder between virtual hosts; None if there is no forwarder.

    The kernel counts CPU time in units of 10 ms.
    """
    if (task := os.environ.get(FORWARDER_VARIABLE)) is None:
        return None
    figures = Path("/proc", task, "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(figures[_UTIME]) + int(figures[_STIME])) / os.sysconf("SC_CLK_TCK")


class ForwarderUse(CpuUse):
    """CPU time of the forwarder between virtual hosts; `share` is the share of one core that the forwarder used."""

    @override
    def _read(self) -> tuple[float, float] | None:
        cpu_s = forwarder_cpu_s()
        return None if cpu_s is None else (cpu_s, time.perf_counter())
