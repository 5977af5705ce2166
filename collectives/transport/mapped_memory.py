"""Memory that all ranks of a transport map: creating it, and synchronising stores and loads in it.

Layout: header page | lines, in whole pages | data. A line is written by one rank and holds 64-bit numbers that tell the
other ranks its progress. Aligned 8-byte stores are atomic.
"""

from __future__ import annotations

import json
import os
import struct
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch

from collectives.options import OptionError
from collectives.transport import messages
from collectives.transport.base import Transport
from collectives.transport.cache_lines import CacheLines, cache_lines, stores_are_ordered
from collectives.transport.memory_region import Region, reserve, rounded_up

PAGE = 4096
LINE = 128  # two cache lines, because processors fetch them in pairs
MAGIC = int.from_bytes(b"gradwire", "little")

_HEADER = struct.Struct("<QQ16s")


class SharedMemory:
    """One rank's view of a region.

    Args:
        region: the mapped memory, at least `nbytes_of(num_lines, ...)` long.
        num_lines: lines in front of the data.
        helper: memory fences and cache flushes; None if the processor orders stores and caches are coherent.
        coherent: ranks see each other's stores without flushing.

    Attributes:
        data: uint8, the memory after the lines.
    """

    def __init__(self, region: Region, num_lines: int, helper: CacheLines | None, *, coherent: bool) -> None:
        self.region = region
        self._lines = region.memory[PAGE : PAGE + LINE * num_lines]
        self._numbers = self._lines.numpy().view(np.uint64).reshape(num_lines, LINE // 8)
        self.data = region.memory[nbytes_of(num_lines, 0) :]
        self._helper = helper
        self._coherent = coherent

    def format(self, nonce: bytes) -> None:
        """Write the header and zero the lines; call on one rank only, before any other reads."""
        self._numbers[:] = 0
        header = bytearray(_HEADER.pack(MAGIC, len(self._numbers), nonce))
        self.region.memory[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
        self.synchronize(self.region.memory[: PAGE + self._lines.nbytes])

    def check(self, nonce: bytes) -> None:
        """Check that this memory was formatted with `nonce`.

        Raises:
            OptionError: it is other memory, such as a file of the same name on another machine.
        """
        self.synchronize(self.region.memory[:PAGE])
        header = self.region.memory[: _HEADER.size].numpy().tobytes()
        if header != _HEADER.pack(MAGIC, len(self._numbers), nonce):
            raise OptionError("pool: ranks do not see the same memory; all must run on one machine or share one device")

    def announce(self, line: int, field: int, value: int) -> None:
        """Store a number in this rank's own line; other ranks see all earlier writes before it."""
        if self._helper is not None:
            self._helper.fence()
        self._numbers[line, field] = value
        self._synchronize_lines(line, 1)

    def announced(self, line: int, field: int) -> int:
        """Return a number from another rank's line; what that rank wrote before it is visible after this call."""
        self._synchronize_lines(line, 1)
        value = int(self._numbers.item(line, field))
        if self._helper is not None:
            self._helper.fence()
        return value

    def all_announced(self, field: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return the same number from every line, as `announced` does from one."""
        self._synchronize_lines(0, len(self._numbers))
        values = self._numbers[:, field].copy()
        if self._helper is not None:
            self._helper.fence()
        return values

    def synchronize(self, part: torch.Tensor) -> None:
        """Call after writing `part` and before announcing it, and before reading what another rank announced."""
        self.synchronize_at(part.data_ptr(), part.nbytes)

    def synchronize_at(self, address: int, nbytes: int) -> None:
        """Do `synchronize` for `nbytes` at an address."""
        if not self._coherent:
            assert self._helper is not None  # non-coherent memory is never mapped without it
            self._helper.flush(address, nbytes)

    def _synchronize_lines(self, first: int, count: int) -> None:
        self.synchronize_at(self._lines.data_ptr() + LINE * first, LINE * count)


def nbytes_of(num_lines: int, data_nbytes: int) -> int:
    """Return the length of a region with this many lines and this much data."""
    return PAGE + rounded_up(LINE * num_lines, PAGE) + data_nbytes


def map_together(
    transport: Transport, place: Path, num_lines: int, data_nbytes: int, *, coherent: bool | None, smaller: str
) -> SharedMemory:
    """Map one region on all ranks, which must all call. The file's name is removed before the region is used.

    Args:
        transport: the ranks; rank 0 creates the region and sends its path to the others.
        place: a folder, the name of a new file, or a DAX device; the argument of rank 0 is used.
        num_lines: lines in front of the data; initially zero.
        data_nbytes: length of the data; not initialised.
        coherent: ranks see each other's stores without flushing. None: they do; a device is then refused.
        smaller: the option, in an error message, that the user should decrease if there is no room.

    Raises:
        OptionError: on all ranks: there is no room or no such path, or non-coherent memory cannot be flushed.
    """
    offer = _Offer(transport, num_lines, coherent=coherent is not False)
    transport.barrier()  # no rank still uses memory that was there before
    memory, problem = None, "pool: another rank cannot map the region; see its message"
    try:
        try:
            if transport.rank == 0:
                memory = offer.make(place, data_nbytes, smaller, is_stated=coherent is not None)
            else:
                memory = offer.join()
        except OptionError as error:
            problem = str(error)
        (num_failed,) = transport.all_reduce_scalars([float(memory is None)], "sum")
    finally:
        if memory is not None and transport.rank == 0:
            memory.region.remove_name()
    if memory is None or num_failed:
        raise OptionError(problem)
    return memory


class _Offer:
    """A region that rank 0 creates and offers to the other ranks."""

    def __init__(self, transport: Transport, num_lines: int, *, coherent: bool) -> None:
        self._transport = transport
        self._num_lines = num_lines
        self._coherent = coherent

    def make(self, place: Path, data_nbytes: int, smaller: str, *, is_stated: bool) -> SharedMemory:
        """Create and format the region on rank 0; send the other ranks its path, or the reason of the failure."""
        try:
            memory, description = self._made(place, data_nbytes, smaller, is_stated=is_stated)
        except OptionError as error:
            self._broadcast({"problem": str(error)})
            raise
        self._broadcast(description)
        return memory

    def _made(
        self, place: Path, data_nbytes: int, smaller: str, *, is_stated: bool
    ) -> tuple[SharedMemory, dict[str, Any]]:
        try:
            helper = self._helper()
            if not is_stated and place.is_char_device():
                raise OptionError(
                    f"pool: {place} may be shared by hosts that do not see each other's stores; "
                    "set coherent=true or coherent=false"
                )
            extent = reserve(place, nbytes_of(self._num_lines, data_nbytes), smaller)
            memory = SharedMemory(Region(*extent), self._num_lines, helper, coherent=self._coherent)
        except OSError as error:
            raise OptionError(f"pool: {place} cannot be shared: {error}; choose another path") from None
        nonce = uuid.uuid4()
        memory.format(nonce.bytes)
        path = str(extent.path)
        return memory, {"path": path, "nbytes": extent.nbytes, "offset": extent.offset, "nonce": nonce.hex}

    def join(self) -> SharedMemory:
        """Map the region that rank 0 created."""
        offer = self._broadcast(None)
        if "problem" in offer:
            raise OptionError(offer["problem"])
        try:
            region = Region(Path(offer["path"]), offer["nbytes"], offer["offset"])
        except OSError as error:
            raise OptionError(
                f"pool: rank {self._transport.name(self._transport.rank)} cannot map {offer['path']} "
                f"({error.strerror}); all ranks must run on one machine or share one device"
            ) from None
        memory = SharedMemory(region, self._num_lines, self._helper(), coherent=self._coherent)
        memory.check(bytes.fromhex(offer["nonce"]))
        return memory

    def _broadcast(self, offer: dict[str, Any] | None) -> dict[str, Any]:
        """Return rank 0's offer on every rank; all must call."""
        text = bytearray(json.dumps(offer).encode())
        message = None if offer is None else torch.frombuffer(text, dtype=torch.uint8).to(self._transport.device)
        with self._transport.counted_as("control"):
            received = messages.broadcast_bytes(self._transport, message, source=0)
        return dict(json.loads(received.cpu().numpy().tobytes()))

    def _helper(self) -> CacheLines | None:
        """Return fences and flushes; None if processor and caches do not need them."""
        try:
            return None if self._coherent and stores_are_ordered() else cache_lines()
        except OSError as error:
            raise OptionError(
                f"pool: the helper that flushes caches cannot be stored: {error}; set XDG_CACHE_HOME"
            ) from None


LOOKS_BEFORE_SLEEP = 100
SLEEP_S = 50e-6


class SpinThenSleep:
    """Pauses of one wait: it yields the processor at first, and later sleeps between looks.

    Args:
        timeout_s: longest wait, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._looks = 0

    def pause(self) -> bool:
        """Wait a little before the next look; return False if the time is up."""
        self._looks += 1
        if self._looks <= LOOKS_BEFORE_SLEEP:
            os.sched_yield()
            return True
        time.sleep(SLEEP_S)
        return time.monotonic() < self._deadline

    def renew(self) -> None:
        """Stop sleeping between looks, because more data may arrive soon; the deadline stays the same."""
        self._looks = 0
