"""Memory layout of the `pool` collective, and the rounds in which ranks sum and gather through that memory.

A set of slots has one slot per rank and one for the result. Consecutive slots lie in different regions, so that the
traffic of one round is spread over all regions. Each rank has a line in the first region with three numbers: the last
round that it filled, the last round that it read and added, and the length of its current message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from collectives.payloads.base import balanced_borders
from collectives.schedule.execution import WireLost
from collectives.transport.base import ReduceOp, Transport
from collectives.transport.mapped_memory import LINE, SharedMemory, SpinThenSleep
from collectives.transport.messages import sum_wires_into_

READY, DONE, LENGTH = 0, 1, 2


class PoolMemory:
    """One rank's view of the pool.

    Args:
        memories: the regions, each with `region_nbytes(...)` of data; the first has one line per rank.
        rank: number of this rank.
        world_size: number of ranks.
        slot_bytes: length of a slot, a multiple of the page size.
        num_sets: sets of slots, which consecutive rounds use in turn.
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
        """Return the slot of `rank` in this round, uint8 [nbytes]."""
        index, region = divmod(round_ % self._num_sets * (self.world_size + 1) + rank, len(self._memories))
        start = index * self.slot_bytes
        return self._memories[region].data[start : start + nbytes]

    def result(self, round_: int, nbytes: int) -> torch.Tensor:
        """Return the slot of this round's sum, uint8 [nbytes]; each rank writes its own part of it."""
        return self.slot(round_, self.world_size, nbytes)

    def announce(self, field: int, value: int) -> None:
        """Write a number of this rank's own line; other ranks see all earlier writes before it."""
        self._memories[0].announce(self.rank, field, value)

    def behind(self, field: int, value: int) -> list[int]:
        """Return the ranks whose number has not reached `value` yet."""
        return [int(rank) for rank in np.flatnonzero(self._memories[0].all_announced(field) < value)]

    def lengths(self) -> list[int]:
        """Return the message length that each rank announced; valid once all ranks are READY."""
        return [int(length) for length in self._memories[0].all_announced(LENGTH)]

    def synchronize(self, part: torch.Tensor) -> None:
        """Call after writing `part` and before announcing it, and before reading what another rank announced."""
        self._memories[0].synchronize(part)


def region_nbytes(world_size: int, slot_bytes: int, num_sets: int, num_regions: int) -> int:
    """Return the length of the data in each region."""
    return -(-num_sets * (world_size + 1) // num_regions) * slot_bytes


class PoolRounds:
    """Runs this rank's part of sums and gathers, each of which takes one or more rounds.

    In each round a rank fills its slot and announces READY; then it reads all slots, writes its part of the result and
    announces DONE. Two sets of slots make it safe to fill ahead:

    - A rank fills its slot of the next round before all ranks are DONE, so that slot is in the other set. It uses a
      set again only after it saw that all ranks are DONE with it.
    - A rank reads a result after it has announced the next READY, so the next result is in the other set. A result
      slot is written again only after all ranks announced the READY after that, which they do after reading.

    A sum of one piece fills nothing ahead: the next READY follows the reading, so one set is enough.

    Args:
        memory: the slots.
        transport: the ranks that share the memory.
    """

    def __init__(self, memory: PoolMemory, transport: Transport) -> None:
        self.memory = memory
        self._transport = transport
        self._round = 0

    def sum_(self, wire: torch.Tensor, op: ReduceOp, lost: WireLost | None = None) -> None:
        """Replace `wire` (mutated; it may be this rank's slot itself) by the sum in rank order; all ranks must call."""
        memory, n, rank = self.memory, self._transport.world_size, self._transport.rank
        ledger = self._transport.ledger
        pieces = wire.split(memory.slot_bytes // wire.element_size())
        lies_in_slot = wire.data_ptr() == memory.slot(0, rank, 1).data_ptr()
        if not wire.numel():
            return

        def fill(round_: int, index: int) -> None:
            piece = pieces[index]
            own = lines_of(piece, rank, n)
            slot = memory.slot(round_, rank, piece.nbytes).view(wire.dtype)
            if lies_in_slot:
                ledger.book(piece.nbytes)
            else:
                slot[: own.start] = piece[: own.start]
                slot[own.stop :] = piece[own.stop :]
                ledger.book(piece.nbytes - piece[own].nbytes)
            memory.synchronize(slot)

        def combine(round_: int, index: int) -> None:
            piece = pieces[index]
            own = lines_of(piece, rank, n)
            terms = [memory.slot(round_, other, piece.nbytes).view(wire.dtype)[own] for other in range(n)]
            terms[rank] = piece[own]
            for term in terms:
                memory.synchronize(term)
            result = memory.result(round_, piece.nbytes).view(wire.dtype)[own]
            start = index * (memory.slot_bytes // wire.element_size()) + own.start
            sum_wires_into_(result, terms, op, lost and functools.partial(lost, start))
            memory.synchronize(result)
            ledger.book(result.nbytes)

        def read(round_: int, index: int) -> None:
            piece = pieces[index]
            result = memory.result(round_, piece.nbytes)
            memory.synchronize(result)
            piece.copy_(result.view(wire.dtype))
            if lies_in_slot:
                ledger.book(piece.nbytes)

        self._run(lambda: len(pieces), fill, combine, read)

    def gather(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's packed payload, uint8, in rank order; all ranks must call."""
        memory, rank = self.memory, self._transport.rank
        buffers: list[torch.Tensor] = []

        def piece(buffer: torch.Tensor, index: int) -> torch.Tensor:
            return buffer[index * memory.slot_bytes : (index + 1) * memory.slot_bytes]

        def fill(round_: int, index: int) -> None:
            part = piece(packed, index)
            slot = memory.slot(round_, rank, part.nbytes)
            slot.copy_(part)
            memory.synchronize(slot)
            if index == 0:
                memory.announce(LENGTH, packed.numel())
            self._transport.ledger.book(part.nbytes)

        def num_rounds() -> int:
            lengths = memory.lengths()
            buffers.extend(torch.empty(length, dtype=torch.uint8) for length in lengths)
            buffers[rank] = packed
            return -(-max(lengths) // memory.slot_bytes)

        def combine(round_: int, index: int) -> None:
            for other, buffer in enumerate(buffers):
                part = piece(buffer, index)
                if other != rank and part.numel():
                    slot = memory.slot(round_, other, part.nbytes)
                    memory.synchronize(slot)
                    part.copy_(slot)

        self._run(num_rounds, fill, combine, lambda round_, index: None)
        return buffers

    def _run(
        self,
        num_rounds: Callable[[], int],
        fill: Callable[[int, int], None],
        combine: Callable[[int, int], None],
        read: Callable[[int, int], None],
    ) -> None:
        """Run all rounds of one sum or gather; each callback gets the round and the index of the piece."""
        with self._transport.ledger.timed():
            fill(self._round + 1, 0)
            self.memory.announce(READY, self._round + 1)
            self._await(READY, self._round + 1)
            count = num_rounds()
            for index in range(count):
                self._round += 1
                self._await(READY, self._round)
                combine(self._round, index)
                self.memory.announce(DONE, self._round)
                if index + 1 < count:
                    fill(self._round + 1, index + 1)
                    self.memory.announce(READY, self._round + 1)
                self._await(DONE, self._round)
                read(self._round, index)

    def _await(self, field: int, value: int) -> None:
        """Wait until every rank has announced `value`.

        Raises:
            TransportError: a rank did not announce it in time.
        """
        patience = SpinThenSleep(self._transport.timeout_s)
        while late := self.memory.behind(field, value):
            if not patience.pause():
                raise self._transport.timeout_error(late[0])


def lines_of(tensor: torch.Tensor, rank: int, world_size: int) -> slice:
    """Return the elements that `rank` adds: whole lines, because no line may have two writers.

    A cache that is not coherent writes back whole lines, and would overwrite the other writer's part with old data.
    """
    per_line = LINE // tensor.element_size()
    borders = balanced_borders(-(-tensor.numel() // per_line), world_size)
    first, last = (min(border * per_line, tensor.numel()) for border in borders[rank : rank + 2])
    return slice(first, last)
