"""Pool: all-reduce through one region of memory that every rank maps: on one machine, or around one CXL memory pool.

Source: the pool collectives of CCCL (arXiv:2602.22457), in a form that needs no coherence: every line has a single
writer, no atomic read-modify-write, no locks. Each rank copies what it has into its slot and announces it in its line;
when all have, each adds its own chunk over all slots in rank order and announces that; then everybody copies the
result. Two sets of slots alternate, so that a rank fills one while others still read the other. What cannot be added
element by element is copied to every rank instead and left as terms in rank order. What is longer than a slot goes in
pieces.
Differs: this measures shared memory, not CXL; a DAX device is used in the same way and brings its own latency.

Bytes: written to the pool, the payload once per rank: its slot without its own chunk, and its own chunk of the result.
"""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.base import BoundCollective, Collective, Downlink
from collectives.options import OptionError
from collectives.payloads.base import Payload, balanced_borders, unpack
from collectives.payloads.unreduced_sum import UnreducedSum
from collectives.rounds.layout import Layout
from collectives.shared_memory.cache_lines import CacheLines, cache_lines, stores_are_ordered
from collectives.shared_memory.layout import DONE, LENGTH, PAGE, READY, PoolMemory, region_nbytes
from collectives.shared_memory.region import Region, reserve, rounded_up
from collectives.transport import messages
from collectives.transport.arithmetic import sum_wires_into_
from collectives.transport.base import ReduceOp, Transport

POLLS_BEFORE_SLEEP = 100
SLEEP_S = 50e-6


@dataclass(kw_only=True)
class Pool(Collective):
    """One mapped region of memory."""

    path: Annotated[str, Doc("folder for the region's file, a new file's name, or a DAX device")] = "/dev/shm"
    slot_bytes: Annotated[
        int, Ge(1), Le(2**40), Doc("bytes that a rank hands out at a time; the region holds 2 (n+1) of them")
    ] = 4_194_304
    coherent: Annotated[
        bool | None,
        Doc("caches of all ranks see each other's stores; false flushes lines; none: true, but a DAX device must say"),
    ] = None

    leaves_terms: ClassVar[bool] = True

    @override
    def bind(self, transport: Transport, downlink: Downlink | None = None) -> BoundPool:
        return BoundPool(self, transport)

    @override
    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        return None

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Nothing is sent: memory is shared."""

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        return nbytes if world_size > 1 else 0


class BoundPool(BoundCollective):
    """A region that is made and mapped.

    Raises:
        OptionError: no room, no such path, or memory that is not coherent and no way to flush it.
    """

    options: Pool

    def __init__(self, options: Pool, transport: Transport) -> None:
        super().__init__(options, transport)
        self._round = 0
        self._is_coherent = options.coherent is not False
        self._slot_bytes = rounded_up(options.slot_bytes, PAGE)
        self._memory = self._map() if transport.world_size > 1 else None

    @override
    def sum_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> Payload:
        if layout.itemsize is None:
            return UnreducedSum([unpack(packed) for packed in self._gather(payload.pack().cpu())])
        wire = payload.wire
        host = wire.cpu()
        self._sum_in_place(host, op)
        return payload.with_wire(host.to(wire.device))

    @override
    def close(self) -> None:
        self._memory = None  # the region's name was removed as soon as all ranks had it

    def _sum_in_place(self, wire: torch.Tensor, op: ReduceOp) -> None:
        memory, n, rank = self._memory, self.transport.world_size, self.transport.rank
        assert memory is not None
        pieces = wire.split(memory.slot_bytes // wire.element_size())
        if not wire.numel():
            return

        def chunk(part: torch.Tensor) -> torch.Tensor:
            borders = balanced_borders(part.numel(), n)
            return part[borders[rank] : borders[rank + 1]]

        def fill(round_: int, index: int) -> None:
            piece = pieces[index]
            slot = memory.slot(round_, rank, piece.nbytes).view(wire.dtype)
            borders = balanced_borders(piece.numel(), n)
            slot[: borders[rank]] = piece[: borders[rank]]
            slot[borders[rank + 1] :] = piece[borders[rank + 1] :]
            memory.synchronize(slot)
            self.transport.ledger.book(piece.nbytes - chunk(piece).nbytes)

        def combine(round_: int, index: int) -> None:
            piece = pieces[index]
            terms = [chunk(memory.slot(round_, other, piece.nbytes).view(wire.dtype)) for other in range(n)]
            terms[rank] = chunk(piece)
            for term in terms:
                memory.synchronize(term)
            result = chunk(memory.result(round_, piece.nbytes).view(wire.dtype))
            sum_wires_into_(result, terms, op)
            memory.synchronize(result)
            self.transport.ledger.book(result.nbytes)

        def read(round_: int, index: int) -> None:
            result = memory.result(round_, pieces[index].nbytes)
            memory.synchronize(result)
            pieces[index].copy_(result.view(wire.dtype))

        self._run(lambda: len(pieces), fill, combine, read)

    def _gather(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's packed payload, in rank order."""
        memory, rank = self._memory, self.transport.rank
        assert memory is not None
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
            self.transport.ledger.book(part.nbytes)

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
        """All rounds of one sum; each callback gets the round's number and the piece's.

        A slot is filled again two rounds later, after its owner saw that all had read it. A result is written again two
        rounds later, after all had announced the next round, which they do after reading it.
        """
        memory = self._memory
        assert memory is not None
        with self.transport.ledger.timed():
            fill(self._round + 1, 0)
            memory.announce(READY, self._round + 1)
            self._await(READY, self._round + 1)
            count = num_rounds()
            for index in range(count):
                self._round += 1
                self._await(READY, self._round)
                combine(self._round, index)
                memory.announce(DONE, self._round)
                if index + 1 < count:
                    fill(self._round + 1, index + 1)
                    memory.announce(READY, self._round + 1)
                self._await(DONE, self._round)
                read(self._round, index)

    def _await(self, field: int, value: int) -> None:
        """Wait until every rank has announced `value`.

        Raises:
            TransportError: some did not in time.
        """
        memory, transport = self._memory, self.transport
        assert memory is not None
        deadline = time.monotonic() + transport.timeout_s
        for poll in itertools.count():
            late = memory.behind(field, value)
            if not late:
                return
            if poll < POLLS_BEFORE_SLEEP:
                os.sched_yield()
                continue
            time.sleep(SLEEP_S)
            if time.monotonic() > deadline:
                raise transport.timeout_error(late[0])

    def _map(self) -> PoolMemory:
        """Rank 0 makes the region, all map it, and its name is removed before anybody uses it."""
        memory, problem = None, "pool: another rank cannot map the region; see its message"
        try:
            try:
                memory = self._make() if self.transport.rank == 0 else self._join()
            except OptionError as error:
                problem = str(error)
            (num_failed,) = self.transport.all_reduce_scalars([float(memory is None)], "sum")
        finally:
            if memory is not None and self.transport.rank == 0:
                memory.region.remove_name()
        if memory is None or num_failed:
            raise OptionError(problem)
        return memory

    def _make(self) -> PoolMemory:
        """The region, formatted; the others are told where it is, or why there is none."""
        n = self.transport.world_size
        try:
            helper = self._helper()
            path, nbytes = reserve(Path(self.options.path), region_nbytes(n, self._slot_bytes))
            if self.options.coherent is None and path.is_char_device():
                raise OptionError(
                    f"pool: {path} need not show all hosts each other's stores; say coherent=true or coherent=false"
                )
        except OptionError as error:
            self._tell({"problem": str(error)})
            raise
        nonce = uuid.uuid4()
        memory = PoolMemory(Region(path, nbytes), 0, n, self._slot_bytes, helper, coherent=self._is_coherent)
        memory.format(nonce.bytes)
        self._tell({"path": str(path), "nbytes": nbytes, "nonce": nonce.hex})
        return memory

    def _join(self) -> PoolMemory:
        """The region that rank 0 made."""
        offer = self._tell(None)
        if "problem" in offer:
            raise OptionError(offer["problem"])
        rank, n = self.transport.rank, self.transport.world_size
        try:
            region = Region(Path(offer["path"]), offer["nbytes"])
            memory = PoolMemory(region, rank, n, self._slot_bytes, self._helper(), coherent=self._is_coherent)
        except OSError as error:
            raise OptionError(
                f"pool: rank {self.transport.name(rank)} cannot map {offer['path']} ({error.strerror}); all ranks "
                "must run on one machine or share one device"
            ) from None
        memory.check(bytes.fromhex(offer["nonce"]))
        return memory

    def _tell(self, offer: dict[str, Any] | None) -> dict[str, Any]:
        """Rank 0's offer, on every rank."""
        text = bytearray(json.dumps(offer).encode())
        message = None if offer is None else torch.frombuffer(text, dtype=torch.uint8).to(self.transport.device)
        with self.transport.counted_as("control"):
            told = messages.broadcast_bytes(self.transport, message, source=0)
        return dict(json.loads(told.cpu().numpy().tobytes()))

    def _helper(self) -> CacheLines | None:
        """What orders and flushes stores, where the processor and its caches need that."""
        return None if self._is_coherent and stores_are_ordered() else cache_lines()
