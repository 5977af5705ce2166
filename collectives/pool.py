"""Pool: all-reduce through memory that all ranks map, on one machine or in a CXL memory pool.

Source: the pool collectives of CCCL (arXiv:2602.22457), in a form that does not need cache coherence: every cache line
has a single writer, and there are no locks and no atomic read-modify-write operations. Each rank copies its payload
into its slot (its part of the memory), and announces in its own cache line that the slot is full. When all slots are
full, each rank adds its own chunk over all slots in rank order, and announces that its chunk is done; then every rank
copies the result. Two sets of slots alternate, so that a rank can fill one set while others still read the other set.
Payloads that are not element-wise are copied to every rank; their sum is the list of these payloads in rank order.
Payloads longer than a slot are transferred in pieces. A gradient that lies in the pool (`BoundPool.buffer`) is used as
a slot and is not copied.
Differs: this measures shared memory, not CXL. A DAX device is used in the same way, with the latency of that device.

Bytes written to the pool: each rank writes its payload without its own chunk, and its own chunk of the result, so as
many bytes as its payload has. For a gradient in the pool: the whole gradient, the rank's own chunk of the result, and
the total.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.base import BoundCollective, Collective, PendingSum, SumEncoder
from collectives.options import OptionError
from collectives.payloads.base import Payload, balanced_borders, unpack
from collectives.payloads.bundle import UnreducedSum
from collectives.schedule.execution import WireLost, lost_on_wire
from collectives.schedule.rounds import Layout
from collectives.transport.base import ReduceOp, Transport
from collectives.transport.mapped_memory import LINE, PAGE, SharedMemory, SpinThenSleep, map_together
from collectives.transport.memory_region import rounded_up
from collectives.transport.messages import sum_wires


@dataclass(kw_only=True)
class Pool(Collective):
    """Sum through memory that all ranks map."""

    path: Annotated[
        tuple[str, ...],
        Doc("folder for the region's file, a new file's name, or a DAX device; one for all regions or one for each"),
    ] = ("/dev/shm",)
    regions: Annotated[int, Ge(1), Le(1024), Doc("number of memory regions, among which the slots are distributed")] = 1
    slot_bytes: Annotated[
        int, Ge(1), Le(2**40), Doc("bytes of a slot, the memory for one rank's data; n ranks need 2 (n+1) slots")
    ] = 4_194_304
    coherent: Annotated[
        bool | None,
        Doc("true: caches are coherent; false: flush cache lines; none: as true, but refuse a DAX device"),
    ] = None

    leaves_terms: ClassVar[bool] = True

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.path) not in (1, self.regions):
            raise OptionError(
                f"pool: path={'+'.join(self.path) or 'none'} names {len(self.path)} places and regions={self.regions}; "
                "name one place for all regions, or one for each"
            )

    @override
    def bind(self, transport: Transport, encoder: SumEncoder | None = None) -> BoundPool:
        return BoundPool(self, transport)

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Return None, because ranks share memory and send no messages."""

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        return nbytes if world_size > 1 else 0


class BoundPool(BoundCollective):
    """The collective `pool` among the ranks of a transport: creates and maps the memory regions, and sums through them.

    Raises:
        OptionError: there is not enough memory, the path does not exist, or memory is not coherent and cache lines
            cannot be flushed.
    """

    options: Pool

    def __init__(self, options: Pool, transport: Transport) -> None:
        super().__init__(options, transport)
        self._rounds_of_buffers: dict[int, PoolRounds] = {}  # by the address of the buffer
        self._pool_rounds: PoolRounds | None = None
        if transport.world_size > 1:
            self._pool_rounds = self._map(rounded_up(options.slot_bytes, PAGE), 2, "a smaller slot_bytes")

    def buffer(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of zeros, `dtype` [numel], that lies in the shared memory and belongs to this rank.

        Every rank must call this method with the same arguments. `sum` makes no copy of a payload that is exactly such
        a buffer, because the ranks read all buffers in place; then every rank must pass its own buffer. The sum
        replaces the contents of the buffer, which the caller may then overwrite. The buffer is valid until `close`.

        Args:
            numel: number of elements.
            dtype: dtype of the elements.

        Raises:
            OptionError: there is not enough memory.
        """
        nbytes = numel * dtype.itemsize
        if self._pool_rounds is None or not numel:
            return torch.zeros(numel, dtype=dtype)
        rounds = self._map(rounded_up(nbytes, PAGE), 1, "a smaller buffer")
        buffer = rounds.slot(0, self.transport.rank, nbytes).view(dtype)
        self._rounds_of_buffers[buffer.data_ptr()] = rounds
        return buffer.zero_()

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        assert self._pool_rounds is not None
        if layout.itemsize is None:
            gathered = self._pool_rounds.gather(payload.pack().cpu())
            return PendingSum.done(UnreducedSum([unpack(packed.to(payload.device)) for packed in gathered]))
        wire = payload.wire
        host = wire.cpu()
        self._rounds_of_buffers.get(host.data_ptr(), self._pool_rounds).sum_(host, op, lost_on_wire(payload))
        return PendingSum.done(payload.with_wire(host.to(wire.device)))

    @override
    def close(self) -> None:
        self._pool_rounds = None  # the files of the regions were already removed once all ranks had mapped them
        self._rounds_of_buffers.clear()

    def _map(self, slot_bytes: int, num_sets: int, smaller: str) -> PoolRounds:
        """Map memory regions for `num_sets` sets of slots, and return the `PoolRounds` that use them.

        A slot is the part of the memory for one rank's data, or for the result. Every rank must call this method.
        If there is not enough memory, the error message advises `smaller`, such as "a smaller buffer".
        """
        transport, options = self.transport, self.options
        n, num_regions = transport.world_size, options.regions
        nbytes = region_nbytes(n, slot_bytes, num_sets, num_regions)
        memories = [
            map_together(transport, Path(path), n, nbytes, coherent=options.coherent, smaller=smaller)
            for path in options.path * (num_regions // len(options.path))
        ]
        return PoolRounds(transport, memories, slot_bytes, num_sets)


READY, DONE, LENGTH = 0, 1, 2  # fields of a rank's line: last round that it filled, last round that it added, length


class PoolRounds:
    """One rank's part of the sums and gathers through shared memory, each of which takes one or more rounds.

    A slot is a part of the memory that one rank fills; a set of slots has one per rank and one for the result.
    Consecutive slots lie in different regions, so that the traffic of one round is spread over all regions. Each rank
    has a line (128 bytes that only this rank writes) in the first region. The line holds three numbers: the last round
    in which the rank filled its slot, the last round in which it read and added, and the length of its current message.

    In each round a rank fills its slot and announces READY; then it reads all slots, writes its part of the result and
    announces DONE. With two sets of slots, a rank can safely fill its slot for the next round early:

    - A rank fills its slot for the next round before all ranks are DONE, so that slot must be in the other set. The
      rank uses a set again only after it has seen that all ranks are DONE with it.
    - A rank reads a result after it has announced the next READY, so the next result must be in the other set. A result
      slot is overwritten only after all ranks have announced one more READY, which they do after reading the result.

    A sum of one piece fills nothing early, because the next READY follows the reading; so one set is enough.

    Args:
        transport: the ranks that share the memory.
        memories: the regions, each with `region_nbytes(...)` of data; the first has one line per rank.
        slot_bytes: length of a slot, a multiple of the page size.
        num_sets: sets of slots, which consecutive rounds use in turn.
    """

    def __init__(self, transport: Transport, memories: Sequence[SharedMemory], slot_bytes: int, num_sets: int) -> None:
        self._transport = transport
        self._memories = memories
        self._lines = memories[0]
        self._slot_bytes = slot_bytes
        self._num_sets = num_sets
        self._round = 0

    def slot(self, round_: int, rank: int, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` bytes of the slot of `rank` in this round; rank `world_size` means the result."""
        number = round_ % self._num_sets * (self._transport.world_size + 1) + rank
        index, region = divmod(number, len(self._memories))
        return self._memories[region].data[index * self._slot_bytes :][:nbytes]

    def sum_(self, wire: torch.Tensor, op: ReduceOp, lost: WireLost | None = None) -> None:
        """Replace `wire` with the sum of all ranks' tensors in rank order. Every rank must call this method.

        Args:
            wire: 1-D, of the same length and dtype on all ranks, mutated; may lie in this rank's slot.
            op: "sum" or "max".
            lost: called with the rounding errors, fp32, of the sums that this rank rounds to 16 bits: (index of the
                first of these elements, errors).
        """
        lines, n, rank = self._lines, self._transport.world_size, self._transport.rank
        ledger = self._transport.ledger
        pieces = wire.split(self._slot_bytes // wire.element_size())
        lies_in_slot = wire.data_ptr() == self.slot(0, rank, 1).data_ptr()
        if not wire.numel():
            return

        def fill(round_: int, index: int) -> None:
            piece = pieces[index]
            own = lines_of(piece, rank, n)
            slot = self.slot(round_, rank, piece.nbytes).view(wire.dtype)
            if lies_in_slot:
                ledger.book(piece.nbytes)
            else:
                slot[: own.start] = piece[: own.start]
                slot[own.stop :] = piece[own.stop :]
                ledger.book(piece.nbytes - piece[own].nbytes)
            lines.synchronize(slot)

        def combine(round_: int, index: int) -> None:
            piece = pieces[index]
            own = lines_of(piece, rank, n)
            terms = [self.slot(round_, other, piece.nbytes).view(wire.dtype)[own] for other in range(n)]
            terms[rank] = piece[own]
            for term in terms:
                lines.synchronize(term)
            result = self.slot(round_, n, piece.nbytes).view(wire.dtype)[own]
            start = index * (self._slot_bytes // wire.element_size()) + own.start
            sum_wires(terms, op, out=result, lost=lost and functools.partial(lost, start))
            lines.synchronize(result)
            ledger.book(result.nbytes)

        def read(round_: int, index: int) -> None:
            piece = pieces[index]
            result = self.slot(round_, n, piece.nbytes)
            lines.synchronize(result)
            piece.copy_(result.view(wire.dtype))
            if lies_in_slot:
                ledger.book(piece.nbytes)

        self._run(lambda: len(pieces), fill, combine, read)

    def gather(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's packed payload, uint8 1-D, in rank order. Every rank must call this method."""
        lines, rank = self._lines, self._transport.rank
        buffers: list[torch.Tensor] = []

        def fill(round_: int, index: int) -> None:
            part = packed[index * self._slot_bytes :][: self._slot_bytes]
            slot = self.slot(round_, rank, part.nbytes)
            slot.copy_(part)
            lines.synchronize(slot)
            if index == 0:
                lines.announce(rank, LENGTH, packed.numel())
            self._transport.ledger.book(part.nbytes)

        def num_rounds() -> int:
            lengths = [int(length) for length in lines.all_announced(LENGTH)]  # all ranks are READY
            buffers.extend(torch.empty(length, dtype=torch.uint8) for length in lengths)
            buffers[rank] = packed
            return -(-max(lengths) // self._slot_bytes)

        def combine(round_: int, index: int) -> None:
            for other, buffer in enumerate(buffers):
                part = buffer[index * self._slot_bytes :][: self._slot_bytes]
                if other != rank and part.numel():
                    slot = self.slot(round_, other, part.nbytes)
                    lines.synchronize(slot)
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
        """Run all rounds of one sum or gather through shared memory; each round transfers one piece of the payload.

        Args:
            num_rounds: returns the number of rounds; called when all ranks have filled their slots (parts of the
                memory) for the first time.
            fill: writes a piece of this rank's payload into its slot, given the number of the round and the index of
                the piece.
            combine: reads all ranks' slots, given the same two numbers.
            read: reads the result, given the same two numbers.
        """
        with self._transport.ledger.timed():
            fill(self._round + 1, 0)
            self._lines.announce(self._transport.rank, READY, self._round + 1)
            self._await(READY, self._round + 1)
            count = num_rounds()
            for index in range(count):
                self._round += 1
                self._await(READY, self._round)
                combine(self._round, index)
                self._lines.announce(self._transport.rank, DONE, self._round)
                if index + 1 < count:
                    fill(self._round + 1, index + 1)
                    self._lines.announce(self._transport.rank, READY, self._round + 1)
                self._await(DONE, self._round)
                read(self._round, index)

    def _await(self, field: int, value: int) -> None:
        """Wait until every rank has announced at least `value` in this field (READY or DONE) of its shared line.

        Raises:
            TransportError: a rank did not announce this value in time.
        """
        patience = SpinThenSleep(self._transport.timeout_s)
        while len(late := np.flatnonzero(self._lines.all_announced(field) < value)):
            if not patience.pause():
                raise self._transport.timeout_error(int(late[0]))


def region_nbytes(world_size: int, slot_bytes: int, num_sets: int, num_regions: int) -> int:
    """Return the bytes of each memory region; together they hold `num_sets` sets of `world_size` + 1 slots."""
    return -(-num_sets * (world_size + 1) // num_regions) * slot_bytes


def lines_of(tensor: torch.Tensor, rank: int, world_size: int) -> slice:
    """Return the slice of `tensor` that `rank` adds: whole cache lines, because no line may have two writers.

    A cache that is not coherent writes back whole lines, and so would overwrite another writer's part with old data.
    """
    per_line = LINE // tensor.element_size()
    borders = balanced_borders(-(-tensor.numel() // per_line), world_size)
    first, last = (min(border * per_line, tensor.numel()) for border in borders[rank : rank + 2])
    return slice(first, last)
