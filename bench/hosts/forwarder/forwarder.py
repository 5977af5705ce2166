"""Forwarder: a switch of our own between virtual hosts that delays and loses frames and follows traces.

It needs no kernel module but `tun`: every host's `eth0` is a TAP device, whose frames a thread of the supervisor reads,
holds and hands on (`native/forwarder.c`). It lives and dies with the supervisor. The rate of an uplink stays with the
kernel's token bucket on `eth0`, which makes a sender wait instead of dropping what it sends too fast.
Source: Linux, Documentation/networking/tuntap.rst.
"""

from __future__ import annotations

import array
import ctypes
import dataclasses
import fcntl
import functools
import os
import struct
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.core.errors import UsageError
from bench.hosts.cluster import HostLink
from bench.hosts.forwarder.build import HERE, LIBRARY, sources
from bench.hosts.forwarder.trace import Trace
from bench.hosts.network import queue_bytes
from collectives.kernels.library import Library, open_library


@functools.cache
def found() -> Library:
    """The library, or why there is none; looked for once."""
    return open_library(HERE / LIBRARY, sources(), "compiled")


def library() -> ctypes.CDLL:
    """The library.

    Raises:
        UsageError: there is none.
    """
    handle = found().handle
    if handle is None:
        raise UsageError(f"the forwarder between virtual hosts is missing: {found().finding}; run `make setup`")
    return handle


TUN = Path("/dev/net/tun")

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_UNLIMITED_QUEUE_BYTES = 256_000_000


class _Direction(ctypes.Structure):
    """`Direction` of forwarder.c."""

    _fields_ = (
        ("bytes_per_ns", ctypes.c_double),
        ("trace", ctypes.c_void_p),
        ("trace_length", ctypes.c_int64),
        ("queue_bytes", ctypes.c_int64),
    )


class _Host(ctypes.Structure):
    """`Host` of forwarder.c."""

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("loss", ctypes.c_uint32),
        ("up", _Direction),
        ("down", _Direction),
        ("latency_ns", ctypes.c_int64),
        ("jitter_ns", ctypes.c_int64),
        ("forwarded", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
    )


class _Network(ctypes.Structure):
    """`Network` of forwarder.c."""

    _fields_ = (
        ("hosts", ctypes.POINTER(_Host)),
        ("num_hosts", ctypes.c_int32),
        ("stop_fd", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("origin_ns", ctypes.c_int64),
    )


@dataclasses.dataclass(frozen=True)
class Counts:
    """What became of the frames that a host sent to others, each counted once; a broadcast is one to each of them.

    Attributes:
        forwarded: on the receiver's downlink, or through it.
        lost: on purpose.
        dropped: a queue was full, or the receiver did not take it.
    """

    forwarded: int
    lost: int
    dropped: int


class Direction:
    """One direction of a link as the forwarder takes it: a rate, a trace, or neither."""

    def __init__(self, rate_bps: float | None, trace: Trace | None) -> None:
        """Read the trace.

        Raises:
            UsageError: its file is gone, or it is another one.
        """
        self._opportunities = trace.opportunities() if trace else array.array("I")
        address, length = self._opportunities.buffer_info()
        mean_bps = trace.mean_bps if trace else rate_bps
        self.native = _Direction(
            bytes_per_ns=(rate_bps or 0.0) / 8e9,
            trace=address,
            trace_length=length,
            queue_bytes=queue_bytes(mean_bps) if mean_bps else _UNLIMITED_QUEUE_BYTES,
        )

    def departures(self, arrivals_ns: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """When frames leave that come at these times, if none is dropped; nanoseconds from the beginning."""
        numbers = ctypes.c_int64 * len(lengths)
        left = numbers()
        library().departures(
            ctypes.byref(self.native), ctypes.c_int64(len(lengths)), numbers(*arrivals_ns), numbers(*lengths), left
        )
        return list(left)


class Forwarder:
    """A running forwarder; its thread ends with `close`, or with the process."""

    def __init__(self, links: Sequence[HostLink], descriptors: Sequence[int], *, seed: int) -> None:
        """Start it.

        Args:
            links: what was asked of each host; constant rates of uplinks are not its work.
            descriptors: of each host, what gives and takes single frames and does not block; closed with the forwarder.
            seed: of losses and jitter: the n-th frame of a host is lost in every run with this seed, or in none.

        Raises:
            UsageError: a trace's file is gone, or it is another one.
        """
        self._descriptors = list(descriptors)
        self._up = [Direction(None, link.uplink_trace) for link in links]
        self._down = [Direction(link.downlink_bps, link.downlink_trace) for link in links]
        self._hosts = (_Host * len(links))(*map(_host, links, descriptors, self._up, self._down))
        stop, self._stop = os.pipe()
        self._descriptors.append(stop)
        self._network = _Network(self._hosts, len(links), stop, seed, time.monotonic_ns())
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._thread.start()

    @property
    def task(self) -> str:
        """Name of the thread below /proc, where its use of processors can be read."""
        return f"{os.getpid()}/task/{self._thread.native_id}"

    def restart(self) -> None:
        """From now on traces, losses and jitter are those of the beginning."""
        self._network.origin_ns = time.monotonic_ns()

    def counts(self) -> list[Counts]:
        """Of each host's frames, since the start."""
        return [Counts(host.forwarded, host.lost, host.dropped) for host in self._hosts]

    def close(self) -> None:
        """End it; frames under way are gone."""
        os.close(self._stop)
        self._thread.join()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _run(self) -> None:
        if library().forward(ctypes.byref(self._network)) != 0:
            raise MemoryError("the forwarder has no memory")


def _host(link: HostLink, descriptor: int, up: Direction, down: Direction) -> _Host:
    return _Host(
        fd=descriptor,
        loss=min(round(link.loss * 2**32), 2**32 - 1),
        up=up.native,
        down=down.native,
        latency_ns=round(link.latency_s * 1e9),
        jitter_ns=round(link.jitter_s * 1e9),
    )


def open_tap(interface: str) -> int:
    """Make a TAP device in the calling thread's network namespace; it is gone when the descriptor is closed.

    Raises:
        OSError: the kernel has none, or this user may not have one.
    """
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor
