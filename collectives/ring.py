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

from collectives.base import ReducingCollective
from collectives.payloads.base import Payload, balanced_borders, unpack
from collectives.payloads.bundle import Bundle
from collectives.transport import messages
from collectives.transport.schedule import Step


@dataclasses.dataclass(kw_only=True)
class Ring(ReducingCollective):
    """Neighbours on a ring."""

    def _steps(self, wire: torch.Tensor) -> list[Step]:
        rank, n = self.transport.rank, self.transport.world_size
        left, right = (rank - 1) % n, (rank + 1) % n
        borders = balanced_borders(wire.numel(), n)
        chunks = [wire[start:stop] for start, stop in itertools.pairwise(borders)]
        steps = []
        for index in range(2 * (n - 1)):
            sent, received = chunks[(rank - index) % n], chunks[(rank - index - 1) % n]
            step = Step()
            step.send(sent, right)
            if index < n - 1:
                step.add(received, left)
            else:
                step.replace(received, left)
            steps.append(step)
        return steps

    def _merge(self, payload: Payload, layout: Payload) -> Payload:
        transport, rank, n = self.transport, self.transport.rank, self.transport.world_size
        left, right = (rank - 1) % n, (rank + 1) % n
        intervals = list(itertools.pairwise(layout.borders(n)))
        chunks = [payload.slice(start, stop) for start, stop in intervals]
        bounds = [messages.bound_nbytes(layout.slice(start, stop)) for start, stop in intervals]
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
