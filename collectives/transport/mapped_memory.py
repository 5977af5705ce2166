"""Memory that all ranks of a transport map: how they come to have it, and how they see what others store in it.

Layout: header page | lines, in whole pages | data. A line has one writer and holds 64-bit numbers, which others read:
how far that rank is. Aligned 8-byte stores are seen whole.
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
LINE = 128  # a pair of cache lines, which processors fetch together
MAGIC = int.from_bytes(b"gradwire", "little")

_HEADER = struct.Struct("<QQ16s")


class SharedMemory:
    """One rank's view of a region.

    Args:
        region: the mapped memory, at least `nbytes_of(num_lines, ...)` long.
        num_lines: lines in front of the data.
        helper: fences, and flushes where caches are not coherent; None where the processor orders stores by itself.
        coherent: ranks see each other's stores without flushing.

    Attributes:
        data: uint8, what follows the lines.
    """

    def __init__(self, region: Region, num_lines: int, helper: CacheLines | None, *, coherent: bool) -> None:
        self.region = region
        self._lines = region.memory[PAGE : PAGE + LINE * num_lines]
        self._numbers = self._lines.numpy().view(np.uint64).reshape(num_lines, LINE // 8)
        self.data = region.memory[nbytes_of(num_lines, 0) :]
        self._helper = helper
        self._coherent = coherent

    def format(self, nonce: bytes) -> None:
        """Start afresh, whatever the region held; one rank only, before any other looks."""
        self._numbers[:] = 0
        header = bytearray(_HEADER.pack(MAGIC, len(self._numbers), nonce))
        self.region.memory[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
        self.synchronize(self.region.memory[: PAGE + self._lines.nbytes])

    def check(self, nonce: bytes) -> None:
        """Make sure that this is the memory that was formatted with `nonce`.

        Raises:
            OptionError: it is another one (another machine's file of the same name).
        """
        self.synchronize(self.region.memory[:PAGE])
        header = self.region.memory[: _HEADER.size].numpy().tobytes()
        if header != _HEADER.pack(MAGIC, len(self._numbers), nonce):
            raise OptionError("pool: ranks do not see the same memory; all must run on one machine or share one device")

    def announce(self, line: int, field: int, value: int) -> None:
        """Store a number in a line of this rank's own; everything written before is seen before it."""
        if self._helper is not None:
            self._helper.fence()
        self._numbers[line, field] = value
        self._synchronize_lines(line, 1)

    def announced(self, line: int, field: int) -> int:
        """Return a number of another rank's; everything written before it is seen after this call."""
        self._synchronize_lines(line, 1)
        value = int(self._numbers.item(line, field))
        if self._helper is not None:
            self._helper.fence()
        return value

    def all_announced(self, field: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return this number of every line, as `announced` does of one."""
        self._synchronize_lines(0, len(self._numbers))
        values = self._numbers[:, field].copy()
        if self._helper is not None:
            self._helper.fence()
        return values

    def synchronize(self, part: torch.Tensor) -> None:
        """Call after writing `part` and before announcing it, and before reading what another rank announced."""
        self.synchronize_at(part.data_ptr(), part.nbytes)

    def synchronize_at(self, address: int, nbytes: int) -> None:
        """`synchronize` for a stretch of memory."""
        if not self._coherent:
            assert self._helper is not None  # nothing is mapped without it
            self._helper.flush(address, nbytes)

    def _synchronize_lines(self, first: int, count: int) -> None:
        self.synchronize_at(self._lines.data_ptr() + LINE * first, LINE * count)


def nbytes_of(num_lines: int, data_nbytes: int) -> int:
    """Return the length of a region with so many lines and so much data."""
    return PAGE + rounded_up(LINE * num_lines, PAGE) + data_nbytes


def map_together(
    transport: Transport, place: Path, num_lines: int, data_nbytes: int, *, coherent: bool | None, smaller: str
) -> SharedMemory:
    """Map one region on all ranks, which must all call. Its name is removed before anybody uses it.

    Args:
        transport: the ranks; rank 0 makes the region and tells the others where it is.
        place: a folder, the name of a new file, or a DAX device; rank 0's counts.
        num_lines: lines in front of the data; zeros at first.
        data_nbytes: length of the data, which may hold anything at first.
        coherent: ranks see each other's stores without flushing; None: they do, but not if `place` is a device.
        smaller: what the user chooses smaller if there is no room.

    Raises:
        OptionError: on all ranks: no room, no such place, or memory that is not coherent and no way to flush it.
    """
    offer = _Offer(transport, num_lines, coherent=coherent is not False)
    transport.barrier()  # nobody uses any more what lay there before
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
    """A region on its way from rank 0 to the others."""

    def __init__(self, transport: Transport, num_lines: int, *, coherent: bool) -> None:
        self._transport = transport
        self._num_lines = num_lines
        self._coherent = coherent

    def make(self, place: Path, data_nbytes: int, smaller: str, *, is_stated: bool) -> SharedMemory:
        """The region, formatted; the others are told where it is, or why there is none."""
        try:
            memory, told = self._made(place, data_nbytes, smaller, is_stated=is_stated)
        except OptionError as error:
            self._tell({"problem": str(error)})
            raise
        self._tell(told)
        return memory

    def _made(
        self, place: Path, data_nbytes: int, smaller: str, *, is_stated: bool
    ) -> tuple[SharedMemory, dict[str, Any]]:
        try:
            helper = self._helper()
            if not is_stated and place.is_char_device():
                raise OptionError(
                    f"pool: {place} need not show all hosts each other's stores; say coherent=true or coherent=false"
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
        """The region that rank 0 made."""
        offer = self._tell(None)
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

    def _tell(self, offer: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's offer, on every rank."""
        text = bytearray(json.dumps(offer).encode())
        message = None if offer is None else torch.frombuffer(text, dtype=torch.uint8).to(self._transport.device)
        with self._transport.counted_as("control"):
            told = messages.broadcast_bytes(self._transport, message, source=0)
        return dict(json.loads(told.cpu().numpy().tobytes()))

    def _helper(self) -> CacheLines | None:
        """What orders and flushes stores, where the processor and its caches need that."""
        try:
            return None if self._coherent and stores_are_ordered() else cache_lines()
        except OSError as error:
            raise OptionError(
                f"pool: the helper that flushes caches cannot be kept: {error}; set XDG_CACHE_HOME"
            ) from None


LOOKS_BEFORE_SLEEP = 100
SLEEP_S = 50e-6


class SpinThenSleep:
    """One wait.

    Args:
        timeout_s: how long it may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._looks = 0

    def pause(self) -> bool:
        """Wait a little before the next look; return whether there is time for one."""
        self._looks += 1
        if self._looks <= LOOKS_BEFORE_SLEEP:
            os.sched_yield()
            return True
        time.sleep(SLEEP_S)
        return time.monotonic() < self._deadline

    def renew(self) -> None:
        """Something has come, so more may come soon: look closely again. The deadline stays."""
        self._looks = 0
