"""BufferPool: memory for what travels whole, kept from step to step; fresh pages cost more than the copy into them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from collectives.base import Key
from collectives.payloads.dense import Dense
from compressors.ddp.unit import EncodeGroup


class BufferPool:
    """A message's memory comes back once its sum is done, and serves the same unit at the next step.

    What does not come back belongs to whoever has the message.
    """

    def __init__(self) -> None:
        self._free: dict[Key, torch.Tensor] = {}
        self._lent: dict[Key, torch.Tensor] = {}
        self._returned: dict[Key, torch.Tensor] = {}

    def acquire(self, unit: EncodeGroup) -> torch.Tensor:
        """Return a tensor [numel] of the unit's type, of undefined contents; a message around it needs no copy."""
        room = self._free.pop(unit.key, None)
        if room is None or room.numel() != unit.layer.numel or room.dtype != unit.dtype:
            room = Dense.room(unit.layer.numel, unit.dtype, unit.device)
        self._lent[unit.key] = room
        return room

    def release(self, units: Iterable[EncodeGroup]) -> None:
        """Take note that nobody reads any more what these units sent at this step."""
        for unit in units:
            if (room := self._lent.pop(unit.key, None)) is not None:
                self._returned[unit.key] = room

    def end_step(self) -> None:
        """Keep what came back; the rest is of buckets that were regrouped, or in other hands."""
        self._free, self._lent, self._returned = self._returned, {}, {}
