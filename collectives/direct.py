"""Direct: every rank sends each part of its payload to the part's owner, which adds and sends the sum to all.

Source: the pairwise exchange of Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in
MPICH" (2005). Shares by the rates of the links: Diskin et al., "Distributed deep learning in open collaborations"
(2021, arXiv:2106.10207), who find the shares with a linear program.
The payload is cut into segments, and each segment into one part per rank. The length of a rank's part is its share. The
owner of a part adds all contributions in rank order, so the result does not depend on the shares. In round k each rank
sends segment k to the owners and receives the sums of segment k-1, so that both directions of a link are busy.

In a ring of n ranks, each rank sends 2 (n-1)/n of the payload, however long its chunk is, so a slow link delays all
ranks. Here rank j, whose share is s_j, sends and receives 1 + (n-2) s_j payloads. A rank whose share is 0 sends and
receives the payload once, which is the least possible. The shares of `shares=bandwidth` minimise the longest of the
times (1 + (n-2) s_j) / rate_j.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from typing_extensions import Doc, override

from collectives.base import BoundCollective, Collective, PendingSum, SumEncoder
from collectives.options import Count, OptionError, Positive
from collectives.payloads.base import Payload, shifted
from collectives.refusals import Refusal
from collectives.schedule.execution import PackedPieces
from collectives.schedule.rounds import Layout, Piece, Place, Round, Stretch
from collectives.transport.base import ReduceOp, Transport

_MOST_SEGMENTS = 32  # receiving no sums during the first segment then costs 3 % of the whole time
_SPARSITY = 64  # packed payloads are often this many times shorter than dense fp32
_PROBE_BYTES = 1 << 18  # longer than the burst that a rate limit lets pass at full speed


class BoundDirect(BoundCollective):
    """The collective `direct` on one rank; the constructor measures the links' rates if it needs and lacks them."""

    options: Direct

    def __init__(self, options: Direct, transport: Transport, encoder: SumEncoder | None = None) -> None:
        super().__init__(options, transport)
        self._planned = options
        if options.measures(transport.world_size):
            self._planned = dataclasses.replace(options, rates=measured_rates(transport))

    @override
    def rounds_of(self, layout: Layout) -> list[Round]:
        if layout not in self._rounds:
            self._rounds[layout] = self._planned.rounds(self.transport.world_size, self.transport.rank, layout) or []
        return self._rounds[layout]

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        if layout.itemsize is not None:
            return super().start_like(payload, layout, op)

        def added(place: Place, terms: Sequence[Payload]) -> Payload:
            return functools.reduce(lambda total, term: total.add(term, shifted(payload.keep_lost, place[0])), terms)

        pieces = PackedPieces(self.transport, payload, layout)
        pieces.run(self.rounds_of(layout), added)
        return PendingSum.done(pieces.total())


@dataclasses.dataclass(kw_only=True)
class Direct(Collective):
    """Send each part of the payload to the rank that sums it, and get the sums back; fast links can get longer parts.

    Bytes, for n ranks: dense, a rank that sums a share s of the elements sends 1 + (n-2) s times the wire tensor (the
    tensor that is summed). That is 2 (n-1)/n times with equal shares, and once if s is 0. Other payloads: the packed
    parts, and n-1 times the packed sums of the parts that this rank sums.

    Raises:
        OptionError: rates are given without shares=bandwidth.
    """

    bound = BoundDirect

    shares: Annotated[
        Literal["equal", "bandwidth"], Doc("lengths of the parts that ranks sum: equal, or by the rates of their links")
    ] = "equal"
    rates: Annotated[
        tuple[Positive, ...],
        Doc("rate of each rank's link, in any unit, joined by +; none: those of the virtual hosts, or measured"),
    ] = ()
    segment_bytes: Annotated[
        Count, Doc("fewest bytes of a segment; sums of one segment come back while the next one is sent")
    ] = 65_536

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rates and self.shares == "equal":
            raise OptionError("direct: rates without shares=bandwidth have no effect; add shares=bandwidth")

    @override
    def rank_refusals(self, world_size: int) -> list[Refusal]:
        return [
            Refusal(
                bool(self.rates) and len(self.rates) != world_size,
                f"direct: {len(self.rates)} rates do not suit {world_size} ranks, because each rank has one rate",
                [{"collective.rates": None}, {"world_size": len(self.rates)}],
            )
        ]

    def measures(self, world_size: int) -> bool:
        """Return True if the lengths of the parts depend on link rates that the ranks measure in `bind`."""
        return self.shares == "bandwidth" and not self.rates and world_size > 2

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round] | None:
        """Return the rounds, one more than there are segments; None if the lengths of parts follow measured rates."""
        if self.measures(world_size):
            return None
        return owner_rounds(world_size, rank, self.owned(world_size, layout), layout.itemsize)

    @override
    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        segments = self.owned(world_size, layout)
        return [place[:2] for segment in segments for place in segment.values()]

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        if self.measures(world_size):
            return None
        return super().expected_bytes(nbytes, world_size, rank, elementwise=elementwise, itemsize=itemsize)

    def owned(self, world_size: int, layout: Layout) -> list[dict[int, Place]]:
        """Return, for each segment of the payload, a dict from rank to the range of elements that this rank sums.

        A range is (start, stop, number). Ranks that sum no elements are left out.
        """
        shares = best_shares(self.rates) if self.rates else [1 / world_size] * world_size
        ((_, numel),) = layout.chunks(1)
        nbytes = 4 * numel // _SPARSITY if layout.itemsize is None else layout.itemsize * numel
        num_segments = max(1, min(_MOST_SEGMENTS, nbytes // self.segment_bytes))
        *before, whole = [0.0, *itertools.accumulate(shares)]
        starts = [(segment + part / whole) / num_segments for segment in range(num_segments) for part in before]
        borders = [*layout.nearest_cuts([round(start * numel) for start in starts]), numel]
        places = [(start, stop, number) for number, (start, stop) in enumerate(itertools.pairwise(borders))]
        return [
            {rank: places[segment * world_size + rank] for rank, share in enumerate(shares) if share}
            for segment in range(num_segments)
        ]


def owner_rounds(
    world_size: int, rank: int, segments: Sequence[dict[int, Place]], itemsize: int | None = None
) -> list[Round]:
    """Return the rounds in which ranks send each part to its owner, the rank that sums it, and get the sums back.

    Args:
        world_size: number of ranks.
        rank: the rank whose messages to return.
        segments: for each segment of the payload, a dict from each owner to its part, (start, stop, number).
        itemsize: bytes per element of a wire tensor, as in `Round`; None for packed payloads.
    """
    everyone, rounds = frozenset(range(world_size)), []
    for summed, contributed in itertools.pairwise([{}, *segments, {}]):
        round_ = Round(itemsize)
        for distance in range(1, world_size):  # each rank begins with a different peer, to spread the load
            to, source = (rank + distance) % world_size, (rank - distance) % world_size
            if to in contributed:
                round_.send(to, _piece(contributed[to], frozenset([rank])))
            if rank in contributed:
                round_.receive(source, _piece(contributed[rank], frozenset([source])), effect="collect")
            if rank in summed:
                round_.send(to, _piece(summed[rank], everyone))
            if source in summed:
                round_.receive(source, _piece(summed[source], everyone))
        rounds.append(round_)
    return rounds


def _piece(place: Place, terms: frozenset[int]) -> Piece:
    start, stop, number = place
    return Piece(start, stop, terms, number)


def on_links(collective: Collective, rates: tuple[float, ...]) -> Collective:
    """Return the collective with these link rates; unchanged if it needs no rates, or if the user gave some.

    Args:
        collective: any collective; one that is not a `Direct` is returned unchanged.
        rates: rate of each rank's link in any unit, in rank order; empty if the rates are not known.
    """
    if isinstance(collective, Direct) and collective.shares == "bandwidth" and not collective.rates:
        return dataclasses.replace(collective, rates=rates)
    return collective


def best_shares(rates: tuple[float, ...]) -> list[float]:
    """Return the share of the elements that each rank sums, so that the slowest rank finishes as early as possible.

    Rank j sends and receives 1 + (n-2) s_j payloads, which takes (1 + (n-2) s_j) / rate_j. All ranks that sum elements
    take equally long. A rank whose link is too slow for that sums none, so its share is 0.
    """
    n = len(rates)
    if n <= 2:  # both send and receive the payload once, whatever the shares
        return [1 / n] * n
    fastest = sorted(rates, reverse=True)
    for num_owners in range(n, 0, -1):
        seconds = (num_owners + n - 2) / sum(fastest[:num_owners])
        if seconds * fastest[num_owners - 1] >= 1:
            break
    return [max(0.0, seconds * rate - 1) / (n - 2) for rate in rates]


def measured_rates(transport: Transport) -> tuple[float, ...]:
    """Measure the rate of each rank's link, and return the rates in bytes per second, the same on all ranks.

    Every rank must call this function. Each rank sends 256 KiB to every other rank, one after the other. A rank's rate
    is the lower of two rates: the highest at which it sent, and the highest at which it received.
    """
    n, rank = transport.world_size, transport.rank
    flows = [0.0] * (n * n)  # [source][target]
    message = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=transport.device)
    buffer = torch.empty_like(message)
    with transport.counted_as("control"):
        for distance in range(1, n):
            source = (rank - distance) % n
            transport.barrier()
            started = time.perf_counter()
            received, sent = transport.post([(message, (rank + distance) % n)], [(buffer, source)])
            received.wait()
            buffer[-1].item()  # waits for the message on a GPU, where `wait` returns earlier
            flows[source * n + rank] = _PROBE_BYTES / (time.perf_counter() - started)
            sent.wait()
    flows = transport.all_reduce_scalars(flows, "sum")
    return tuple(min(max(flows[j * n : (j + 1) * n]), max(flows[j::n])) for j in range(n))
