"""Create memory that all ranks of a transport map, and make the writes of one rank visible to the others.

Layout: header page | lines, in whole pages | data. A line is 128 bytes that one rank writes; its 64-bit numbers tell
the other ranks about the progress of that rank. Aligned 8-byte stores are atomic.

If the caches of the ranks do not see each other's stores, cache flushes and memory fences are needed. An example is
memory that several hosts map through CXL, unless the device supports back-invalidation. The functions for them are
compiled once with the system's C compiler, into a library in the user's cache folder.

Source: Intel 64 manual, CLFLUSHOPT and SFENCE; Arm ARM, DC CIVAC and DSB.
"""

import ctypes
import functools
import hashlib
import json
import os
import platform
import shutil
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from collectives.options import OptionError
from collectives.transport import messages
from collectives.transport.base import Transport
from collectives.transport.memory_region import Region, reserve, rounded_up

PAGE = 4096
LINE = 128  # two cache lines, because processors fetch cache lines in pairs
MAGIC = int.from_bytes(b"gradwire", "little")

_HEADER = struct.Struct("<QQ16s")

SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
__attribute__((target("clflushopt"))) static void flush_fast(const char *p, const char *end) {
    for (; p < end; p += 64) _mm_clflushopt((void *)p);
}
static void flush(const char *p, const char *end) {
    unsigned a, b = 0, c, d;
    __get_cpuid_count(7, 0, &a, &b, &c, &d);
    if (b & (1u << 23)) flush_fast(p, end);
    else for (; p < end; p += 64) _mm_clflush(p);
    _mm_mfence();
}
#elif defined(__aarch64__)
static void flush(const char *p, const char *end) {
    for (; p < end; p += 64) __asm__ volatile("dc civac, %0" ::"r"(p) : "memory");
    __asm__ volatile("dsb sy" ::: "memory");
}
#else
#error "no cache flush is known for this processor"
#endif
void fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
void flush_lines(const void *start, size_t nbytes) {
    uintptr_t p = (uintptr_t)start;
    fence();
    flush((const char *)(p & ~(uintptr_t)63), (const char *)(p + nbytes));
}
"""


class CacheLines(NamedTuple):
    """Functions that flush cache lines and order loads and stores, from a compiled library.

    Attributes:
        flush: (address, nbytes) -> None: writes cache lines back and removes them from the cache, so that the next load
            reads memory.
        fence: () -> None: prevents the processor from reordering loads and stores across this call.
    """

    flush: Callable[[int, int], None]
    fence: Callable[[], None]


@functools.cache
def cache_lines() -> CacheLines:
    """Return functions that flush cache lines; compile their library if the user's cache folder does not have it.

    Raises:
        OptionError: there is no C compiler, or the compiler fails.
    """
    digest = hashlib.sha256((SOURCE + platform.machine()).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradwire"
    library = folder / f"cachelines-{digest}.so"
    if not library.exists():
        compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
        if compiler is None:
            raise OptionError(
                "pool: flushing cache lines needs a C compiler, and no cc, gcc or clang was found; install one"
            )
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / "cachelines.so"
            command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(built)]
            done = subprocess.run(command, input=SOURCE, text=True, capture_output=True, check=False)
            if done.returncode:
                first = (done.stderr.strip() or "no message").splitlines()[0]
                raise OptionError(f"pool: the cache-flush helper does not compile on this machine: {first}")
            built.replace(library)  # atomically, because other ranks may compile it at the same time
    handle = ctypes.CDLL(str(library))
    flush = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t)(("flush_lines", handle))
    return CacheLines(flush, ctypes.CFUNCTYPE(None)(("fence", handle)))


def stores_are_ordered() -> bool:
    """Return True if other processors see this processor's stores in program order, even without memory fences."""
    return platform.machine() in ("x86_64", "AMD64")


class SharedMemory:
    """One rank's view of a memory region that all ranks map: a header page, lines and data.

    A line is 128 bytes that one rank writes, to tell the other ranks about its progress.

    Args:
        region: the mapped memory, at least `nbytes_of(num_lines, ...)` bytes long.
        num_lines: number of lines (128 bytes that one rank writes) in front of the data.
        helper: memory fences and cache flushes; None if stores are ordered and caches are coherent.
        coherent: True if ranks see each other's stores without flushing caches.

    Attributes:
        data: the memory after the lines, uint8.
    """

    def __init__(self, region: Region, num_lines: int, helper: CacheLines | None, *, coherent: bool) -> None:
        self.region = region
        self._lines = region.memory[PAGE : PAGE + LINE * num_lines]
        self._numbers = self._lines.numpy().view(np.uint64).reshape(num_lines, LINE // 8)
        self.data = region.memory[nbytes_of(num_lines, 0) :]
        self._helper = helper
        self._coherent = coherent

    def format(self, nonce: bytes) -> None:
        """Write a header with `nonce`, random bytes that identify this memory, and zero all lines.

        Call this method on one rank only, before any other rank reads the memory.
        """
        self._numbers[:] = 0
        header = bytearray(_HEADER.pack(MAGIC, len(self._numbers), nonce))
        self.region.memory[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
        self.synchronize(self.region.memory[: PAGE + self._lines.nbytes])

    def check(self, nonce: bytes) -> None:
        """Check that `format` was called for this memory with the same `nonce`, random bytes that identify the memory.

        Raises:
            OptionError: this is other memory, such as a file of the same name on another machine.
        """
        self.synchronize(self.region.memory[:PAGE])
        header = self.region.memory[: _HEADER.size].numpy().tobytes()
        if header != _HEADER.pack(MAGIC, len(self._numbers), nonce):
            raise OptionError("pool: ranks do not see the same memory; all must run on one machine or share one device")

    def announce(self, line: int, field: int, value: int) -> None:
        """Store a number where all ranks can read it: in field `field` of line `line`, which only this rank writes.

        Other ranks see all earlier writes of this rank before they see the number.
        """
        if self._helper is not None:
            self._helper.fence()
        self._numbers[line, field] = value
        self.synchronize_at(self._lines.data_ptr() + LINE * line, LINE)

    def announced(self, line: int, field: int) -> int:
        """Return the number that another rank announced in field `field` of line `line`.

        After this call, this rank sees everything that the other rank wrote before it announced the number.
        """
        self.synchronize_at(self._lines.data_ptr() + LINE * line, LINE)
        value = int(self._numbers.item(line, field))
        if self._helper is not None:
            self._helper.fence()
        return value

    def all_announced(self, field: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the numbers that all ranks announced in field `field`: uint64 [lines].

        After this call, this rank sees everything that the other ranks wrote before they announced the numbers.
        """
        self.synchronize(self._lines)
        values = self._numbers[:, field].copy()
        if self._helper is not None:
            self._helper.fence()
        return values

    def synchronize(self, part: torch.Tensor) -> None:
        """Make this rank's writes to `part` visible to the other ranks, and the other ranks' writes to this rank.

        Call this after writing and before announcing, and before reading what another rank has announced. If memory is
        coherent, nothing is done; otherwise caches are flushed.

        Args:
            part: a part of the region's memory.
        """
        self.synchronize_at(part.data_ptr(), part.nbytes)

    def synchronize_at(self, address: int, nbytes: int) -> None:
        """Make writes to the `nbytes` bytes at an address visible, from this rank to the others and vice versa."""
        if not self._coherent:
            assert self._helper is not None  # non-coherent memory is never mapped without it
            self._helper.flush(address, nbytes)


def nbytes_of(num_lines: int, data_nbytes: int) -> int:
    """Return the bytes of a memory region with a header page, `num_lines` lines of 128 bytes, and data."""
    return PAGE + rounded_up(LINE * num_lines, PAGE) + data_nbytes


def map_together(
    transport: Transport, place: Path, num_lines: int, data_nbytes: int, *, coherent: bool | None, smaller: str
) -> SharedMemory:
    """Create a memory region and map it on all ranks. Every rank must call this function.

    The name of the region's file is removed before this function returns, so that no file remains.

    Args:
        transport: connects the ranks; rank 0 creates the region and sends its path to the others.
        place: a folder, the name of a new file, or a DAX device; the argument of rank 0 is used.
        num_lines: number of lines (128 bytes that one rank writes) in front of the data; they are zero at first.
        data_nbytes: length of the data in bytes; the data is not initialised.
        coherent: True if ranks see each other's stores without flushing caches; False if caches must be flushed.
            None: as True, but a DAX device is refused.
        smaller: what the error message advises the user to choose if there is not enough memory.

    Raises:
        OptionError: there is not enough memory, the path does not exist, or memory is not coherent and caches cannot be
            flushed. The error is raised on all ranks.
    """
    transport.barrier()  # afterwards no rank still uses earlier memory at this place
    memory, text, problem = None, None, "pool: another rank cannot map the region; see its message"
    try:
        if transport.rank == 0:
            memory, offer = _create(place, num_lines, data_nbytes, coherent, smaller)
            text = torch.frombuffer(bytearray(json.dumps(offer).encode()), dtype=torch.uint8).to(transport.device)
        with transport.counted_as("control"):
            text = messages.broadcast_bytes(transport, text, source=0)
        offer = json.loads(text.cpu().numpy().tobytes())
        problem = offer.get("problem", problem)
        if transport.rank and "problem" not in offer:
            try:
                memory = _join(transport, offer, num_lines, coherent)
            except OptionError as error:
                problem = str(error)
        (num_failed,) = transport.all_reduce_scalars([float(memory is None)], "sum")
    finally:
        if memory is not None and transport.rank == 0:
            memory.region.remove_name()
    if memory is None or num_failed:
        raise OptionError(problem)
    return memory


def _create(
    place: Path, num_lines: int, data_nbytes: int, coherent: bool | None, smaller: str
) -> tuple[SharedMemory | None, dict[str, Any]]:
    """Create the shared memory region on rank 0; return the memory, and a message for the other ranks.

    The message says where the region is. If the region cannot be created, the memory is None, and the message holds an
    error message under the key "problem".
    """
    try:
        helper = _helper(coherent)
        if coherent is None and place.is_char_device():
            raise OptionError(
                f"pool: {place} may be shared by hosts that do not see each other's stores; "
                "set coherent=true or coherent=false"
            )
        extent = reserve(place, nbytes_of(num_lines, data_nbytes), smaller)
        memory = SharedMemory(Region(*extent), num_lines, helper, coherent=coherent is not False)
    except OptionError as error:
        return None, {"problem": str(error)}
    except OSError as error:
        return None, {"problem": f"pool: {place} cannot be shared: {error}; choose another path"}
    nonce = uuid.uuid4()
    memory.format(nonce.bytes)
    return memory, {"path": str(extent.path), "nbytes": extent.nbytes, "offset": extent.offset, "nonce": nonce.hex}


def _join(transport: Transport, offer: dict[str, Any], num_lines: int, coherent: bool | None) -> SharedMemory:
    try:
        region = Region(Path(offer["path"]), offer["nbytes"], offer["offset"])
    except OSError as error:
        raise OptionError(
            f"pool: rank {transport.names[transport.rank]} cannot map {offer['path']} "
            f"({error.strerror}); all ranks must run on one machine or share one device"
        ) from None
    memory = SharedMemory(region, num_lines, _helper(coherent), coherent=coherent is not False)
    memory.check(bytes.fromhex(offer["nonce"]))
    return memory


def _helper(coherent: bool | None) -> CacheLines | None:
    # returns None if this processor needs no fences and flushes
    try:
        return None if coherent is not False and stores_are_ordered() else cache_lines()
    except OSError as error:
        raise OptionError(
            f"pool: the helper that flushes caches cannot be stored: {error}; set XDG_CACHE_HOME"
        ) from None


LOOKS_BEFORE_SLEEP = 100
SLEEP_S = 50e-6


class SpinThenSleep:
    """The pauses of a polling loop between its checks: short pauses at first, later sleeps of 50 microseconds.

    Args:
        timeout_s: longest duration of the loop, in seconds.

    Attributes:
        looks: number of pauses so far. Set it to 0 to return to short pauses; the deadline stays the same.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self.looks = 0

    def pause(self) -> bool:
        """Pause before the next check; return False if the loop has lasted longer than `timeout_s`, otherwise True."""
        self.looks += 1
        if self.looks <= LOOKS_BEFORE_SLEEP:
            os.sched_yield()
            return True
        time.sleep(SLEEP_S)
        return time.monotonic() < self._deadline
