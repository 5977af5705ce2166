"""The forwarder: a user-space switch between virtual hosts that delays and loses frames and varies rates.

`tun` is the only kernel module that the forwarder needs: every host's `eth0` is a TAP device, and a thread of the
supervisor reads, holds and passes on the device's frames (`native/forwarder.c`). The forwarder ends with the
supervisor. The kernel's token bucket on `eth0` still limits the rate of an uplink, because the bucket makes a sender
wait instead of dropping frames that are sent too fast.
`python -m bench.hosts.forwarder.forwarder` compiles the library.
Source: Linux, Documentation/networking/tuntap.rst.
"""

import array
import ctypes
import fcntl
import functools
import os
import struct
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from bench.core.errors import UsageError
from bench.hosts.cluster import HostLink, Trace
from bench.hosts.forwarder import HERE, LIBRARY, build, sources
from bench.hosts.network import queue_bytes
from collectives.kernels.build import build_or_say_why
from collectives.kernels.library import Library, open_library


@functools.cache
def found() -> Library:
    """Load the forwarder's compiled library; return its handle, or why it is missing. The result is cached."""
    return open_library(HERE / LIBRARY, sources(), "compiled")


def library() -> ctypes.CDLL:
    """Return the handle of the forwarder's compiled library.

    Raises:
        UsageError: the library has not been compiled, or cannot be loaded.
    """
    handle = found().handle
    if handle is None:
        raise UsageError(f"the forwarder between virtual hosts is missing: {found().finding}; run `make setup`")
    return handle


TUN = Path("/dev/net/tun")

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_UNLIMITED_QUEUE_BYTES = 256_000_000


class LinkDirection(ctypes.Structure):
    """One direction of a link, with a constant rate, a trace, or no limit; the struct `Direction` of forwarder.c."""

    _fields_ = (
        ("bytes_per_ns", ctypes.c_double),
        ("trace", ctypes.c_void_p),
        ("trace_length", ctypes.c_int64),
        ("queue_bytes", ctypes.c_int64),
    )

    def __init__(self, rate_bps: float | None, trace: Trace | None) -> None:
        """Read the trace, if there is one, and choose the size of the queue.

        Args:
            rate_bps: constant rate in bits per second, including headers; None: no constant rate.
            trace: a rate that changes over time, instead of `rate_bps`; None: no trace.

        Raises:
            UsageError: the trace's file cannot be read, or has changed since the run was configured.
        """
        self._opportunities = trace.opportunities() if trace else array.array("I")
        mean_bps = trace.mean_bps if trace else rate_bps
        super().__init__(
            (rate_bps or 0.0) / 8e9,
            *self._opportunities.buffer_info(),
            queue_bytes(mean_bps) if mean_bps else _UNLIMITED_QUEUE_BYTES,
        )

    def departures(self, arrivals_ns: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Return the time at which each frame has passed this direction of the link, if no frame is dropped.

        Args:
            arrivals_ns: time at which each frame arrives, in nanoseconds from the beginning of the trace, like the
                returned times.
            lengths: size of each frame in bytes.
        """
        numbers = ctypes.c_int64 * len(lengths)
        left = numbers()
        library().departures(
            ctypes.byref(self), ctypes.c_int64(len(lengths)), numbers(*arrivals_ns), numbers(*lengths), left
        )
        return list(left)


class ForwardedHost(ctypes.Structure):
    """One host of a running forwarder; the struct `Host` of forwarder.c.

    Attributes:
        forwarded: number of this host's frames that have reached the receiver's downlink; a broadcast counts once per
            receiver.
        lost: number of this host's frames lost on purpose, because the link's `loss` is above 0.
        dropped: number of this host's frames dropped because a queue was full or the receiver did not accept them.
    """

    _fields_ = (
        ("fd", ctypes.c_int32),
        ("loss", ctypes.c_uint32),
        ("up", LinkDirection),
        ("down", LinkDirection),
        ("latency_ns", ctypes.c_int64),
        ("jitter_ns", ctypes.c_int64),
        ("forwarded", ctypes.c_uint64),
        ("lost", ctypes.c_uint64),
        ("dropped", ctypes.c_uint64),
    )


class _Network(ctypes.Structure):
    _fields_ = (
        ("hosts", ctypes.POINTER(ForwardedHost)),
        ("num_hosts", ctypes.c_int32),
        ("stop_fd", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("origin_ns", ctypes.c_int64),
    )


class Forwarder:
    """A running forwarder; its thread ends with `close`, or with the process.

    Attributes:
        hosts: one `ForwardedHost` per host, with its link and the counts of its frames since the start.
    """

    def __init__(self, links: Sequence[HostLink], descriptors: Sequence[int], *, seed: int = 0) -> None:
        """Start the forwarder.

        Args:
            links: each host's link; constant rates of uplinks are ignored, because the kernel limits those.
            descriptors: one non-blocking file descriptor per host, which reads and writes single frames; closed by
                `close`.
            seed: seed of losses and jitter: the n-th frame of a host is lost in all runs with this seed, or in none.

        Raises:
            UsageError: a trace's file cannot be read, or has changed since the run was configured.
        """
        self._up = [LinkDirection(None, link.uplink_trace) for link in links]
        self._down = [LinkDirection(link.downlink_bps, link.downlink_trace) for link in links]
        self.hosts = (ForwardedHost * len(links))(
            *(
                ForwardedHost(
                    fd=descriptor,
                    loss=min(round(link.loss * 2**32), 2**32 - 1),
                    up=up,
                    down=down,
                    latency_ns=round(link.latency_s * 1e9),
                    jitter_ns=round(link.jitter_s * 1e9),
                )
                for link, descriptor, up, down in zip(links, descriptors, self._up, self._down, strict=True)
            )
        )
        stop, self._stop = os.pipe()
        self._descriptors = [*descriptors, stop]
        self._network = _Network(self.hosts, len(links), stop, seed, time.monotonic_ns())
        self._thread = threading.Thread(target=self._run, name="forwarder", daemon=True)
        self._thread.start()

    @property
    def task(self) -> str:
        """Return the path below /proc of the forwarder's thread, where the thread's CPU time can be read."""
        return f"{os.getpid()}/task/{self._thread.native_id}"

    def restart(self, seed: int) -> None:
        """Start the varying rates, losses and jitter from their beginning, with this seed; frames continue to pass."""
        self._network.seed = seed
        self._network.origin_ns = time.monotonic_ns()

    def close(self) -> None:
        """End the forwarder; frames in flight are lost."""
        os.close(self._stop)
        self._thread.join()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _run(self) -> None:
        if library().forward(ctypes.byref(self._network)) != 0:
            raise MemoryError("the forwarder between virtual hosts could not allocate memory")


def open_tap(interface: str) -> int:
    """Create a TAP device in the calling thread's network namespace, and return its non-blocking file descriptor.

    The device disappears when the descriptor is closed.

    Raises:
        OSError: the kernel has no TAP devices, or this user may not use them.
    """
    descriptor = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", interface.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


if __name__ == "__main__":
    sys.exit(build_or_say_why(HERE, build) or None)
