"""The collectives `native` (the backend's own all-reduce), `ring`, `halving_doubling`, `tree` and `allgather`.

In `ring`, `halving_doubling` and `tree`, ranks add dense payloads in place, part by part. Payloads that are not dense
are merged at each hop with the payload of the rank that receives them. `allgather` gives every rank all payloads; each
rank adds them itself.
"""

import dataclasses
from typing import Annotated, ClassVar

import torch
from typing_extensions import Doc, override

from collectives.base import BoundCollective, Collective, PendingSum, SumEncoder
from collectives.options import Count, Incompatible
from collectives.payloads.base import Payload, PayloadError
from collectives.payloads.bundle import UnreducedSum
from collectives.payloads.codes import Codes
from collectives.recoding import RequantisingRing
from collectives.schedule.execution import PackedPieces
from collectives.schedule.rounds import Layout, Piece, ReceiveEffect, Round, Stretch
from collectives.transport.base import Pending, ReduceOp, Transport


class BoundNative(BoundCollective):
    """The collective `native`, ready to sum among the ranks of a transport."""

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        wire = payload.wire
        if wire.dtype == torch.int16:
            raise PayloadError("native cannot add 16-bit integers; use 8- or 32-bit ones, or collective ring")
        pending = self.transport.start_all_reduce_(wire, op) if wire.numel() else Pending()

        def finish() -> Payload:
            pending.wait()
            if wire.dtype in (torch.float16, torch.bfloat16):
                limit = torch.finfo(wire.dtype).max
                wire.clamp_(-limit, limit)  # the backend overflows, while other collectives saturate
            return payload.with_wire(wire)

        return PendingSum(wait=pending.wait, finish=finish)


@dataclasses.dataclass(kw_only=True)
class Native(Collective, name="native"):
    """Sum the dense tensor with the all-reduce of the torch.distributed backend, as DDP does by default; the baseline.

    The backend determines the order of additions and the rounding: 16-bit sums are rounded at every hop.

    Bytes: 2 (n-1)/n of the wire tensor (the tensor that is sent) per rank, for n ranks. This is the formula of a ring,
    because the backend does not report how much it sends.
    """

    bound = BoundNative

    @override
    def check_compatible(self, kind: type[Payload]) -> None:
        if not kind.elementwise:
            raise Incompatible(
                f"native adds tensors element by element, which {kind.__name__} payloads do not allow; "
                + ("ring adds them by merging, " if kind.addable else "")
                + "allgather takes every kind"
            )

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Return None, because the backend does not reveal which messages it sends."""

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        return 2 * (world_size - 1) / world_size * nbytes


@dataclasses.dataclass(kw_only=True)
class Ring(Collective, name="ring"):
    """Pass chunks around a ring of n ranks: reduce-scatter, then all-gather, in 2 (n-1) steps.

    Source: Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (2009). The
    payload is cut into n chunks. At step s of the reduce-scatter, rank r sends chunk r-s to rank r+1, and adds the
    chunk that arrives to its own chunk r-s-1 (indices modulo n). At step s of the all-gather, rank r sends chunk r+1-s,
    and replaces its chunk r-s with the one that arrives.
    So chunk c is summed as ((x_c + x_{c+1}) + x_{c+2}) + ... + x_{c+n-1} and is complete on rank c-1.
    Differs: chunks are a balanced partition (no padding to a multiple of n). Payloads that are not dense are cut into
    chunks that are merged at each hop, so their union grows; finished chunks are passed on without being unpacked.

    With `requantise`, payloads that are codes can be summed too: each rank decodes the chunk that arrives, adds its own
    part, and encodes the sum again with the run's compressor. The rank keeps the error of this encoding and adds it to
    its own part of the next sum.

    Bytes: dense, 2 (n-1)/n of the wire tensor (the tensor that is sent) if n divides it, in 2 (n-1) messages per rank:
    every chunk is sent twice, except two that are sent once. Payloads that are merged: the packed unions with their
    headers. Codes: as dense, with the packed codes of each chunk.
    """

    requantise: Annotated[
        bool, Doc("sum codes (qsgd, int8): encode each partial sum again, and add the error to the next sum")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recodes = self.keeps_residuals = self.requantise

    @override
    def bind(self, transport: Transport, encoder: SumEncoder | None = None) -> BoundCollective:
        return RequantisingRing(self, transport, encoder) if self.requantise else super().bind(transport)

    @override
    def check_compatible(self, kind: type[Payload]) -> None:
        if not self.requantise:
            if issubclass(kind, Codes):
                raise Incompatible(
                    f"ring adds payloads on their way, which {kind.__name__} does not allow; use ring:requantise=true, "
                    "or collective allgather or server"
                )
            super().check_compatible(kind)
        elif not (kind.elementwise or issubclass(kind, Codes)):
            raise Incompatible(
                f"ring:requantise=true encodes sums of Codes again, and {kind.__name__} payloads are not Codes; use "
                f"collective {'ring' if kind.addable else 'allgather'}"
            )

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        n = world_size
        chunks = layout.chunks(n)

        def partial_sum(chunk: int, num_terms: int) -> Piece:
            # the sum of the contributions of `num_terms` consecutive ranks, the first of which is rank `chunk`
            return Piece(*chunks[chunk % n], frozenset((chunk + hop) % n for hop in range(min(num_terms, n))))

        rounds = []
        for index in range(2 * (n - 1)):
            round_ = Round(layout.itemsize)
            round_.send((rank + 1) % n, partial_sum(rank - index, index + 1))
            effect: ReceiveEffect = "received + own" if index < n - 1 else "replace"
            round_.receive((rank - 1) % n, partial_sum(rank - index - 1, index + 1), effect=effect)
            rounds.append(round_)
        return rounds

    @override
    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        return layout.chunks(world_size)


@dataclasses.dataclass(kw_only=True)
class HalvingDoubling(Collective, name="halving_doubling"):
    """Swap halves, quarters, ... with partners whose distance in rank is halved at each step, in 2 log2(n) steps.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005),
    section 4.5. There are n ranks, and p is the largest power of two up to n. The payload is cut into p chunks. Each
    rank r >= p first sends its payload to rank r-p, which sends the finished sum back at the end. Reduce-scatter: for
    d = p/2, p/4, ..., 1, ranks r and r xor d divide the chunks that both still sum, and each sums one half. All-gather:
    for d = 1, 2, ..., p/2, they swap the finished chunks that they hold. So every chunk is summed by the same tree:
    S(r) = x_r + x_{r+p}, then S(r) <- S(r) + S(r xor d) for falling d. The bytes are as many as in a ring, which needs
    2 (n-1) steps.
    Differs: chunks are a balanced partition; payloads that are not dense are merged at each step.

    Bytes: dense, 2 (p-1)/p of the wire tensor (the tensor that is sent) per rank if p divides it. If rank r+p exists,
    rank r sends the wire tensor once more, and rank r+p sends only the wire tensor, once.
    """

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        chunks = self.cuts(world_size, layout)
        p, everyone = len(chunks), frozenset(range(world_size))
        whole = chunks[0][0], chunks[-1][1]
        finished = [Piece(*chunk, everyone) for chunk in chunks]

        def partial_sum(owner: int, half: slice, distance: int) -> Piece:
            # the partial sum that `owner` holds before it exchanges halves with the rank at this distance
            ranks = frozenset(range(owner % (2 * distance), world_size, 2 * distance))
            return Piece(chunks[half][0][0], chunks[half][-1][1], ranks)

        first, last = Round(layout.itemsize), Round(layout.itemsize)
        if rank >= p:
            first.send(rank - p, Piece(*whole, frozenset([rank])))
            last.receive(rank - p, *finished)
            return [first, last]
        if rank + p < world_size:
            first.receive(rank + p, Piece(*whole, frozenset([rank + p])), effect="own + received")
            last.send(rank + p, *finished)
        halving: list[Round] = []
        doubling: list[Round] = []
        for distance in (p >> bit for bit in range(1, p.bit_length())):  # p/2, p/4, ..., 1
            partner = rank ^ distance
            own, other = (place // distance * distance for place in (rank, partner))  # the first chunk that each keeps
            kept, given = slice(own, own + distance), slice(other, other + distance)
            halve, back = Round(layout.itemsize), Round(layout.itemsize)
            halve.send(partner, partial_sum(rank, given, distance))
            halve.receive(partner, partial_sum(partner, kept, distance), effect="own + received")
            halving.append(halve)
            back.send(partner, *finished[kept])
            back.receive(partner, *finished[given])
            doubling.insert(0, back)
        return [first, *halving, *doubling, last]

    @override
    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        return layout.chunks(1 << (world_size.bit_length() - 1))  # the largest power of two up to world_size


@dataclasses.dataclass(kw_only=True)
class Tree(Collective, name="tree"):
    """Sum up a binary tree to rank 0 and send the total down again, pipelined in segments.

    Source: the pipelined binary tree of Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan" (2009), with one tree. Rank r has the children 2r+1 and 2r+2, and sums S(r) = (x_r + S(2r+1)) +
    S(2r+2).
    Differs: all segments move at the same time, by one level of the tree per step, so the schedule is the same on every
    backend. Payloads that are not dense are not cut into segments; they are merged on the way up, and passed on without
    being unpacked on the way down.

    Bytes: dense, a rank sends the wire tensor (the summed tensor) once to its parent (rank 0 has none) and once to each
    child: at most 3 times per rank, 2 (n-1)/n times on average over n ranks. Latency: that of 2 log2(n) messages.
    """

    segment_bytes: Annotated[Count, Doc("bytes of a dense payload that travel as one message")] = 4_000_000

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        depth, height = ((place + 1).bit_length() - 1 for place in (rank, world_size - 1))  # steps to the root
        segments, parent, everyone = self.segments(layout), (rank - 1) // 2, frozenset(range(world_size))
        below = {place: {place} for place in everyone}  # each rank, and all ranks below it
        for place in range(world_size - 1, 0, -1):
            below[(place - 1) // 2] |= below[place]
        rounds = []
        for time in range(len(segments) + 2 * height - 1):
            round_ = Round(layout.itemsize)
            for child in range(2 * rank + 1, min(2 * rank + 3, world_size)):
                if 0 <= (up := time - (height - depth - 1)) < len(segments):
                    round_.receive(child, Piece(*segments[up], frozenset(below[child])), effect="own + received")
                if 0 <= (down := time - (height + depth)) < len(segments):
                    round_.send(child, Piece(*segments[down], everyone))
            if rank:
                if 0 <= (up := time - (height - depth)) < len(segments):
                    round_.send(parent, Piece(*segments[up], frozenset(below[rank])))
                if 0 <= (down := time - (height + depth - 1)) < len(segments):
                    round_.receive(parent, Piece(*segments[down], everyone))
            rounds.append(round_)
        return rounds

    def segments(self, layout: Layout) -> list[Stretch]:
        """Return the segments (parts) into which an element-wise payload is cut; any other payload is one segment."""
        (whole,) = layout.chunks(1)
        nbytes = 0 if layout.itemsize is None else layout.itemsize * whole[1]
        return layout.chunks(max(1, -(-nbytes // self.segment_bytes)))


class BoundAllgather(BoundCollective):
    """The collective `allgather`, ready to sum among the ranks of a transport."""

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        if op == "max":
            raise PayloadError("allgather cannot compute a maximum over ranks; use collective native or ring")
        pieces = PackedPieces(self.transport, payload, layout)
        (round_,) = self.rounds_of(layout)
        wait = pieces.post(round_)

        def finish() -> Payload:
            pieces.apply(round_, wait)
            return UnreducedSum(pieces.terms((0, layout.numel, 0)))

        return PendingSum(wait=wait, finish=finish)

    def gather(self, payload: Payload, layout: Layout) -> list[Payload]:
        """Return all ranks' payloads in rank order. Every rank must call this method.

        Args:
            payload: this rank's payload, at most as long as the layout allows.
            layout: sizes of the payloads, the same on all ranks; determines the longest possible message.
        """
        pieces = PackedPieces(self.transport, payload, layout)
        pieces.run(self.rounds_of(layout))
        return pieces.terms((0, layout.numel, 0))


@dataclasses.dataclass(kw_only=True)
class Allgather(Collective, name="allgather"):
    """Send every rank's packed payload to all other ranks, each of which adds all payloads; supports all payloads.

    All messages are sent at once, so a sum takes the latency of one message, but the bytes grow with the number of
    ranks. The sum is the list of all payloads in rank order. The list includes this rank's own payload in encoded form,
    as the other ranks receive it, so that all ranks add the same bits.

    Bytes: n-1 times the packed payload per rank, for n ranks.
    """

    carries_wires: ClassVar[bool] = False
    leaves_terms: ClassVar[bool] = True
    bound = BoundAllgather
    finds_maxima = False

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        round_ = Round()
        for distance in range(1, world_size):  # each rank begins with a different peer, to spread the load
            to, source = (rank + distance) % world_size, (rank - distance) % world_size
            round_.send(to, Piece(0, layout.numel, frozenset([rank])))
            round_.receive(source, Piece(0, layout.numel, frozenset([source])), effect="collect")
        return [round_]

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        return (world_size - 1) * nbytes
