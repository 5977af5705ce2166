"""Ring: reduce-scatter, then all-gather, between neighbours; 2(n-1)/n of a dense payload per rank, whatever n is.

Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). The payload is
cut into n chunks. At step s of the reduce-scatter rank r sends chunk r-s to rank r+1 and adds what comes to its chunk
r-s-1 (indices modulo n); at step s of the all-gather it passes on chunk r+1-s and replaces chunk r-s. So chunk c is
summed as ((x_c + x_{c+1}) + x_{c+2}) + ... + x_{c+n-1} and is complete on rank c-1.
Differs: chunks are a balanced partition (no padding to a multiple of n); payloads that are not dense travel as chunks
that are merged at each hop, their union growing as it goes, and finished chunks are passed on unopened.

Bytes: dense, 2(n-1) messages per rank; every chunk but two is sent twice and those once: 2 (n-1)/n of the wire tensor
where n divides it. Merged kinds: what the unions need, headers included.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from collectives import messages
from collectives.arithmetic import combine_
from collectives.base import Collective, Key
from collectives.kinds.bundle import Bundle
from collectives.payload import Payload, balanced_borders, unpack
from collectives.transport import Pending, Receive, ReduceOp, Send, Transport, wait_all


@dataclasses.dataclass(kw_only=True)
class Ring(Collective):
    """Neighbours on a ring."""

    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """What cannot be added on its way."""
        if kind.elementwise or kind.addable:
            return None
        return f"ring adds payloads at every hop, which {kind.__name__} does not allow; use allgather or server"

    def _sum(self, payload: Payload, key: Key, op: ReduceOp) -> Payload:
        if payload.elementwise:
            wire = payload.wire
            all_reduce_(self.transport, wire, op)
            return payload.with_wire(wire)
        return all_reduce_merging(self.transport, payload)

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """Twice the wire tensor, less the two chunks that are sent only once."""
        if world_size == 1:
            return 0
        if not elementwise:
            return None
        borders = balanced_borders(nbytes // itemsize, world_size)
        sizes = [itemsize * (stop - start) for start, stop in itertools.pairwise(borders)]
        return 2 * nbytes - sizes[(rank + 1) % world_size] - sizes[(rank + 2) % world_size]


def all_reduce_(transport: Transport, wire: torch.Tensor, op: ReduceOp = "sum") -> None:
    """Sum a dense tensor over ranks; every rank must call with the same length and dtype.

    Args:
        transport: the ranks, two or more.
        wire: 1-D, contiguous, mutated.
        op: what to do with two elements.
    """
    rank, n = transport.rank, transport.world_size
    borders = balanced_borders(wire.numel(), n)
    chunks = [wire[start:stop] for start, stop in itertools.pairwise(borders)]
    scratch = [torch.empty_like(chunks[0]) for _ in range(2)]
    num_steps = 2 * (n - 1)
    # A buffer posted one step ahead saves a round trip; with two ranks the next buffer is what is being sent, and
    # cannot be.
    ahead = 0 if transport.in_step or n == 2 else 1
    sends: list[list[Pending]] = []
    receives: list[list[Pending]] = []

    def buffer(step: int) -> torch.Tensor:
        chunk = chunks[(rank - step - 1) % n]
        return chunk if step >= n - 1 else scratch[step % 2][: chunk.numel()]

    for posted in range(num_steps + ahead):
        step = posted - ahead
        outgoing: list[Send] = []
        incoming: list[Receive] = []
        if posted < num_steps and buffer(posted).numel():
            if posted >= n - 1:
                wait_all(sends[posted - n + 1])  # the all-gather overwrites what the reduce-scatter sent
            incoming = [(buffer(posted), (rank - 1) % n)]
        if step >= 0 and chunks[(rank - step) % n].numel():
            outgoing = [(chunks[(rank - step) % n], (rank + 1) % n)]
        pendings = transport.post(outgoing, incoming)
        receives.append(pendings[: len(incoming)])
        if step >= 0:
            sends.append(pendings[len(incoming) :])
            wait_all(receives[step])
            if step < n - 1:
                combine_(chunks[(rank - step - 1) % n], buffer(step), op)
    for pending in sends:
        wait_all(pending)


def all_reduce_merging(transport: Transport, payload: Payload) -> Payload:
    """Sum an addable payload over ranks; every rank must call with the same kind and length.

    Returns:
        The summed chunks laid end to end, each of the kind that its union needs.
    """
    rank, n = transport.rank, transport.world_size
    left, right = (rank - 1) % n, (rank + 1) % n
    chunks = payload.split(n)
    bounds = [messages.bound_nbytes(chunk) for chunk in chunks]
    for step in range(n - 1):
        sent, summed = (rank - step) % n, (rank - step - 1) % n
        packed = messages.pack(chunks[sent], transport, bounds[sent])
        (received,) = transport.exchange([(packed, right)], [(bounds[summed], left)])
        chunks[summed] = unpack(received).add(chunks[summed])

    packed = messages.pack(chunks[right], transport, bounds[right])
    chunks[right] = unpack(packed)  # what the others will read
    for step in range(n - 1):
        replaced = (rank - step) % n
        (received,) = transport.exchange([(packed, right)], [(bounds[replaced], left)])
        chunks[replaced] = unpack(received)
        packed = received[: chunks[replaced].nbytes]
    return Bundle(chunks)
