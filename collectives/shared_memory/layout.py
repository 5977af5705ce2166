"""How the pool's region is laid out, and how ranks tell each other in it how far they are.

Layout: header page | one line per rank | two sets of one slot per rank | two results. A line is written by its rank
alone: three 64-bit numbers, the last round filled, the last round read and added, and the length of the message under
way. Aligned 8-byte stores are seen whole.
"""

from __future__ import annotations

import struct

import numpy as np
import torch

from collectives.options import OptionError
from collectives.shared_memory.cache_lines import CacheLines
from collectives.shared_memory.region import Region, rounded_up

PAGE = 4096
LINE = 128  # a pair of cache lines, which processors fetch together
MAGIC = int.from_bytes(b"gradwire", "little")
READY, DONE, LENGTH = 0, 1, 2

_HEADER = struct.Struct("<QQQ16s")


class PoolMemory:
    """One rank's view of the region.

    Args:
        region: the mapped memory, at least `region_nbytes` long.
        rank: whose view.
        world_size: number of ranks.
        slot_bytes: length of a slot, a multiple of the page.
        helper: fences, and flushes where caches are not coherent; None where the processor orders stores by itself.
        coherent: ranks see each other's stores without flushing.
    """

    def __init__(
        self, region: Region, rank: int, world_size: int, slot_bytes: int, helper: CacheLines | None, *, coherent: bool
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.slot_bytes = slot_bytes
        self.region = region
        self._bytes = region.memory
        self._helper = helper
        self._coherent = coherent
        self._slots = PAGE + rounded_up(LINE * world_size, PAGE)
        self._all_lines = self._bytes[PAGE : PAGE + LINE * world_size]
        self._lines = self._all_lines.numpy().view(np.uint64).reshape(world_size, LINE // 8)

    def format(self, nonce: bytes) -> None:
        """Start afresh, whatever the region held; rank 0 only, before any other rank looks."""
        self._lines[:] = 0
        header = bytearray(_HEADER.pack(MAGIC, self.world_size, self.slot_bytes, nonce))
        self._bytes[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
        self.synchronize(self._bytes[: self._slots])

    def check(self, nonce: bytes) -> None:
        """Make sure that this is the memory that rank 0 formatted.

        Raises:
            OptionError: it is another one (another machine's file of the same name).
        """
        self.synchronize(self._bytes[:PAGE])
        header = self._bytes[: _HEADER.size].numpy().tobytes()
        if header != _HEADER.pack(MAGIC, self.world_size, self.slot_bytes, nonce):
            raise OptionError("pool: ranks do not see the same memory; all must run on one machine or share one device")

    def slot(self, round_: int, rank: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]: what `rank` hands out in this round."""
        start = self._slots + (round_ % 2 * self.world_size + rank) * self.slot_bytes
        return self._bytes[start : start + nbytes]

    def result(self, round_: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]: the sum of this round, each chunk written by its rank."""
        start = self._slots + (2 * self.world_size + round_ % 2) * self.slot_bytes
        return self._bytes[start : start + nbytes]

    def announce(self, field: int, value: int) -> None:
        """Write a field of the own line; everything written before is seen before it."""
        if self._helper is not None:
            self._helper.fence()
        self._lines[self.rank, field] = value
        self.synchronize(self._all_lines[LINE * self.rank : LINE * (self.rank + 1)])

    def behind(self, field: int, value: int) -> list[int]:
        """Ranks whose field has not reached `value` yet."""
        self.synchronize(self._all_lines)
        late = np.flatnonzero(self._lines[:, field] < value).tolist()
        if not late and self._helper is not None:
            self._helper.fence()
        return late

    def lengths(self) -> list[int]:
        """The length that each rank announced; valid once all are ready."""
        return [int(length) for length in self._lines[:, LENGTH]]

    def synchronize(self, part: torch.Tensor) -> None:
        """Call after writing `part` and before announcing it, and before reading what another rank announced."""
        if not self._coherent:
            assert self._helper is not None  # the collective refuses to start without it
            self._helper.flush(part.data_ptr(), part.nbytes)


def region_nbytes(world_size: int, slot_bytes: int) -> int:
    """Length of the region."""
    return PAGE + rounded_up(LINE * world_size, PAGE) + 2 * (world_size + 1) * slot_bytes
