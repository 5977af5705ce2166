"""How the pool's memory is laid out, and how ranks tell each other in it how far they are.

A set of slots holds one per rank and one for the result; the slots are dealt out over all regions in turn, so that the
traffic of one round spreads over them. A rank's line, in the first region, holds three numbers: the last round filled,
the last round read and added, and the length of the message under way.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from collectives.shared_memory.memory import SharedMemory

READY, DONE, LENGTH = 0, 1, 2


class PoolMemory:
    """One rank's view of the pool.

    Args:
        memories: the regions, of `region_nbytes(...)` after their lines; the first has one line per rank.
        rank: whose view.
        world_size: number of ranks.
        slot_bytes: length of a slot, a multiple of the page.
        num_sets: sets of slots, which the rounds take in turn.
    """

    def __init__(
        self, memories: Sequence[SharedMemory], rank: int, world_size: int, slot_bytes: int, num_sets: int
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.slot_bytes = slot_bytes
        self._num_sets = num_sets
        self._memories = memories

    def slot(self, round_: int, rank: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]: what `rank` hands out in this round."""
        index, region = divmod(round_ % self._num_sets * (self.world_size + 1) + rank, len(self._memories))
        start = index * self.slot_bytes
        return self._memories[region].data[start : start + nbytes]

    def result(self, round_: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes]: the sum of this round, each chunk written by its rank."""
        return self.slot(round_, self.world_size, nbytes)

    def announce(self, field: int, value: int) -> None:
        """Write a field of the own line; everything written before is seen before it."""
        self._memories[0].announce(self.rank, field, value)

    def behind(self, field: int, value: int) -> list[int]:
        """Ranks whose field has not reached `value` yet."""
        return [int(rank) for rank in np.flatnonzero(self._memories[0].all_announced(field) < value)]

    def lengths(self) -> list[int]:
        """The length that each rank announced; valid once all are ready."""
        return [int(length) for length in self._memories[0].all_announced(LENGTH)]

    def synchronize(self, part: torch.Tensor) -> None:
        """Call after writing `part` and before announcing it, and before reading what another rank announced."""
        self._memories[0].synchronize(part)


def region_nbytes(world_size: int, slot_bytes: int, num_sets: int, num_regions: int) -> int:
    """What each region holds after its lines."""
    return -(-num_sets * (world_size + 1) // num_regions) * slot_bytes
