"""Pool: all-reduce through memory that all ranks map, on one machine or in a CXL memory pool.

Source: the pool collectives of CCCL (arXiv:2602.22457), in a form that does not need cache coherence: every cache line
has a single writer, and there are no locks and no atomic read-modify-write operations. Each rank copies its payload
into its slot and announces that in its line. When all have done so, each rank adds its own chunk over all slots in rank
order and announces that; then every rank copies the result. Two sets of slots alternate, so that a rank can fill one
while others still read the other. Payloads that are not element-wise are copied to every rank, and come back as terms
in rank order. Payloads longer than a slot are transferred in pieces. A gradient that lies in the pool
(`BoundPool.buffer`) serves as its own slot and is not copied.
Differs: measures shared memory, not CXL; a DAX device is used in the same way and has its own latency.

Bytes: written to the pool, once the payload per rank: its slot without its own chunk, and its own chunk of the result.
For a gradient in the pool: the whole gradient, its own chunk of the result, and the total.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import torch
from annotated_types import Ge, Le
from typing_extensions import Doc, override

from collectives.base import BoundCollective, Collective, Downlink
from collectives.options import OptionError
from collectives.payloads.base import Payload, unpack
from collectives.payloads.bundle import UnreducedSum
from collectives.schedule.execution import lost_on_wire
from collectives.schedule.layout import Layout
from collectives.transport.base import ReduceOp, Transport
from collectives.transport.mapped_memory import PAGE, map_together
from collectives.transport.memory_region import rounded_up
from collectives.transport.pool_rounds import PoolMemory, PoolRounds, region_nbytes


@dataclass(kw_only=True)
class Pool(Collective):
    """Sum through memory that all ranks map."""

    path: Annotated[
        tuple[str, ...],
        Doc("folder for the region's file, a new file's name, or a DAX device; one for all regions or one for each"),
    ] = ("/dev/shm",)
    regions: Annotated[int, Ge(1), Le(1024), Doc("number of memory regions, among which the slots are distributed")] = 1
    slot_bytes: Annotated[
        int, Ge(1), Le(2**40), Doc("bytes that a rank shares at a time; the regions hold 2 (n+1) slots")
    ] = 4_194_304
    coherent: Annotated[
        bool | None,
        Doc("whether caches are coherent; false flushes cache lines; none: true, but required for a DAX device"),
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
    def bind(self, transport: Transport, downlink: Downlink | None = None) -> BoundPool:
        return BoundPool(self, transport)

    @override
    def check_compatible(self, kind: type[Payload]) -> None:
        """Accept every kind."""

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Return None, because nothing is sent: memory is shared."""

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        return nbytes if world_size > 1 else 0


class BoundPool(BoundCollective):
    """Create and map the memory regions, and sum through them.

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
        """Return a tensor of zeros in the pool, this rank's own; every rank must call with the same arguments.

        A sum of exactly this tensor makes no copy, because the ranks read all buffers in place; every rank must then
        pass its own buffer. The sum replaces the contents of the buffer, which may then be overwritten. The buffer is
        valid until `close`.

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
        buffer = rounds.memory.slot(0, self.transport.rank, nbytes).view(dtype)
        self._rounds_of_buffers[buffer.data_ptr()] = rounds
        return buffer.zero_()

    @override
    def sum_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> Payload:
        assert self._pool_rounds is not None
        if layout.itemsize is None:
            return UnreducedSum(
                [unpack(packed.to(payload.device)) for packed in self._pool_rounds.gather(payload.pack().cpu())]
            )
        wire = payload.wire
        host = wire.cpu()
        self._rounds_of_buffers.get(host.data_ptr(), self._pool_rounds).sum_(host, op, lost_on_wire(payload))
        return payload.with_wire(host.to(wire.device))

    @override
    def close(self) -> None:
        """Release the mapped regions; their names were already removed when all ranks had mapped them."""
        self._pool_rounds = None
        self._rounds_of_buffers.clear()

    def _map(self, slot_bytes: int, num_sets: int, smaller: str) -> PoolRounds:
        """Map regions for `num_sets` sets of slots; every rank must call."""
        transport, options = self.transport, self.options
        n, num_regions = transport.world_size, options.regions
        nbytes = region_nbytes(n, slot_bytes, num_sets, num_regions)
        memories = [
            map_together(transport, Path(path), n, nbytes, coherent=options.coherent, smaller=smaller)
            for path in options.path * (num_regions // len(options.path))
        ]
        return PoolRounds(PoolMemory(memories, transport.rank, n, slot_bytes, num_sets), transport)
