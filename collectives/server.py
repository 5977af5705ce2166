"""Server: all ranks push their payloads to a parameter server, which sums them in rank order and answers.

Source: Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014); layers as keys and the
splitting of big arrays as in MXNet's KVStore. The servers are also workers. Colocated: one rank serves all layers.
Sharded: of n ranks, rank r serves the layers whose id modulo n is r, and a share of every layer longer than
`split_numel` and of every payload that holds several layers.
The sum is computed in fp32 in rank order (sums of integers in their own dtype). Element-wise payloads are answered with
the same kind and dtype. For other payloads `downlink` selects the answer: `dense` sends all elements in fp32, `union`
the elements that at least one rank sent, and `recode` the sum encoded by the run's compressor.

Answers can lose information: for element-wise payloads of 16 bits, and with `union`, sums are rounded to the dtype that
is sent; `recode` loses what the compressor leaves out. `dense` answers in fp32 lose nothing. With error feedback the
server keeps what is lost of each layer and adds it to the next sum. This costs the server one fp32 tensor per layer,
and no messages.

Bytes: packed payloads. A worker pushes each part once to its server, but no message is sent for the part that the
worker serves itself; a server sends n-1 answers. If one server answers with dense sums, compressing only what workers
push reduces the total traffic by less than a factor of 2, however strong the compression is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Annotated, ClassVar, Literal, NamedTuple

import torch
from typing_extensions import Doc, override

from collectives.base import Collective, PendingSum, SumEncoder
from collectives.options import Count, CountOrZero
from collectives.payloads.base import Dense, Payload
from collectives.payloads.bundle import members
from collectives.payloads.codec.values import SHORT, to_value_dtype
from collectives.payloads.group_sparse import RowSparse
from collectives.payloads.sparse import IndexedValues, Sparse
from collectives.recoding import RecodingSum, by_stretch
from collectives.refusals import Refusal
from collectives.schedule.execution import PackedPieces
from collectives.schedule.rounds import (
    Key,
    LayerStretch,
    Layout,
    Piece,
    Place,
    Round,
    Stretch,
    leaves,
    stretches_between,
)
from collectives.transport.base import ReduceOp, Transport
from collectives.transport.messages import sum_wires


class BoundServer(RecodingSum):
    """The collective `server` on one rank: pushes payloads, sums the parts that this rank serves, and pulls the sums.

    If the answers lose information, the rank also keeps the errors (residuals) of the parts that it serves.
    """

    options: Server

    def __init__(self, options: Server, transport: Transport, encoder: SumEncoder | None) -> None:
        super().__init__(options, transport, encoder)
        self._shards: dict[Layout, list[Shard]] = {}

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        if self._encoder is not None and self.options.tells_layers_apart:
            layout = dataclasses.replace(layout, layer_numels=tuple(map(self._encoder.numel, layout.key)))
        shards = {shard.place: shard for shard in self._shards_of(layout)}
        keeping = [shard for shard in shards.values() if shard.keeps_loss]
        self.settle({stretch: shard.server for shard in keeping for stretch in shard.stretches})
        pieces = PackedPieces(self.transport, payload, layout)
        parts = members(payload, [stop - start for start, stop, _ in shards])
        pieces.held.update(zip(shards, parts, strict=True))
        pieces.run(self.rounds_of(layout), lambda place, terms: self._answer(shards[place], terms, op))
        return PendingSum.done(pieces.total())

    def _shards_of(self, layout: Layout) -> list[Shard]:
        if layout not in self._shards:
            shards = self.options.shards(self.transport.world_size, layout)
            if any(shard.keeps_loss or shard.encodes for shard in shards):
                borders = self.borders_of(layout)
                shards = [
                    shard._replace(stretches=stretches_between(layout.key, borders, *shard.place[:2]))
                    for shard in shards
                ]
            self._shards[layout] = shards
        return self._shards[layout]

    def _answer(self, shard: Shard, terms: Sequence[Payload], op: ReduceOp) -> Payload:
        """Return a server's answer for a shard (part of a message): the sum in rank order plus the kept residual."""
        elementwise = all(term.elementwise for term in terms)
        if op == "max" or not (shard.keeps_loss or (self.options.downlink != "dense" and not elementwise)):
            return added(terms, op)
        total = _sum_in_order(terms)
        if shard.keeps_loss:
            self.add_residuals_to_(total, shard.stretches)
        if elementwise:
            answer = _rounded(terms[0], total)
        elif self.options.downlink == "union":
            answer = _union(terms, total)
        else:
            answer = self.encoder.encode(total, shard.stretches)
        if shard.keeps_loss:
            answer.subtract_from_(total)
            self.propose(by_stretch(total, shard.stretches))
        return answer


class Shard(NamedTuple):
    """The part of a message that one server sums at a time: a layer, a piece of a layer, or a bucket of layers.

    Attributes:
        key: ids of the layers in the shard.
        server: the rank that serves the shard.
        place: (first element in the message, one past the last, number of the shard in the message).
        elementwise: True if ranks push the shard as element-wise payloads of one dtype; the sum has that dtype too.
        keeps_loss: True if the server keeps the error of the sum that it sends back, and adds it to the next sum.
        encodes: True if the server encodes the sum.
        stretches: the parts of layers in the shard; may be empty if neither `keeps_loss` nor `encodes` is True.
    """

    key: Key
    server: int
    place: Place
    elementwise: bool
    keeps_loss: bool
    encodes: bool
    stretches: Sequence[LayerStretch] = ()


@dataclasses.dataclass(kw_only=True)
class Server(Collective):
    """Sum on one or several servers: workers push payloads, servers sum them, and workers pull the sums."""

    carries_wires: ClassVar[bool] = False
    decodes: ClassVar[bool] = True

    bound = BoundServer

    placement: Annotated[
        Literal["colocated", "sharded"], Doc("one rank serves all layers, or the layers are distributed over all ranks")
    ] = "colocated"
    root: Annotated[CountOrZero, Doc("the rank that serves if colocated")] = 0
    downlink: Annotated[
        Literal["dense", "union", "recode"],
        Doc("answer with all elements, with those that some rank sent, or encoded by the run's compressor"),
    ] = "dense"
    split_numel: Annotated[Count, Doc("if sharded, layers with more elements are divided among all servers")] = (
        1_000_000
    )
    error_feedback: Annotated[
        bool | None, Doc("add the error of an answer to the next sum; none: only if answers are encoded (recode)")
    ] = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.recodes = self.downlink == "recode"
        self.keeps_residuals = self.recodes if self.error_feedback is None else self.error_feedback
        self.is_sharded = self.placement == "sharded"
        # a single server with dense answers need not separate layers
        self.tells_layers_apart = self.is_sharded or self.downlink != "dense"

    @override
    def obstacle_to_resizing(self) -> str:
        return f"{self} keeps a part of every layer on each rank" if self.is_sharded else ""

    @override
    def rank_refusals(self, world_size: int) -> list[Refusal]:
        return [
            Refusal(
                self.root >= world_size,
                f"server: root={self.root} is none of the {world_size} ranks, which count from 0",
                [{"collective.root": 0}],
            )
        ]

    def shards(self, world_size: int, layout: Layout) -> list[Shard]:
        """Return the shards (parts, each summed by one server) into which messages with this layout are divided.

        There is one shard per layer if the layers can and need to be separated. If the servers are sharded, long layers
        and payloads that hold several layers are divided among all servers.
        """
        shards: list[Shard] = []
        first = 0
        if not self.tells_layers_apart:
            layout = dataclasses.replace(layout, layer_numels=())
        for part in layout.by_layer():
            is_split = self.is_sharded and (part.numel > self.split_numel or len(part.key) > 1)
            if self.recodes and not all(leaf.is_full for leaf in part.leaves):
                is_split = False  # a layer that is encoded again stays whole, as its compressor needs its shape
            for index, (start, stop) in enumerate(part.cuts(world_size if is_split else 1)):
                server = (part.key[0] + index) % world_size if self.is_sharded else self.root
                place = (first + start, first + stop, len(shards))
                is_whole = stop - start == part.numel or all(leaf.is_full for leaf in part.leaves)
                elementwise = is_whole and part.itemsize is not None
                types = {leaf.wire[1] for leaf in part.leaves if leaf.wire is not None}
                loses = types <= {*SHORT} if elementwise else self.downlink != "dense"  # 16-bit sums are rounded
                keeps_loss, encodes = loses and self.keeps_residuals, self.recodes and not elementwise
                shards.append(Shard(part.key, server, place, elementwise, keeps_loss, encodes))
            first += part.numel
        return shards

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> list[Round]:
        """Return two rounds: ranks send the parts of their messages to the servers; servers send the sums to all."""
        by_server: dict[int, list[Shard]] = {}
        for shard in self.shards(world_size, layout):
            by_server.setdefault(shard.server, []).append(shard)
        push, pull, everyone = Round(), Round(), range(world_size)
        for server in sorted(by_server.keys() - {rank}):
            push.send(server, *_pieces(by_server[server], [rank]))
            pull.receive(server, *_pieces(by_server[server], everyone))
        for worker in sorted({*everyone} - {rank}) if rank in by_server else ():
            push.receive(worker, *_pieces(by_server[rank], [worker]), effect="collect")
            pull.send(worker, *_pieces(by_server[rank], everyone))
        return [push, pull]

    @override
    def cuts(self, world_size: int, layout: Layout) -> list[Stretch]:
        return [shard.place[:2] for shard in self.shards(world_size, layout)]

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        if world_size == 1:
            return 0
        if self.is_sharded:
            return None
        if rank != self.root:
            return nbytes
        return (world_size - 1) * nbytes if elementwise else None


def _sum_in_order(terms: Sequence[Payload]) -> torch.Tensor:  # decoded; a new tensor, fp32 [numel]
    total = terms[0].to_dense()
    for term in terms[1:]:
        term.add_to_(total)
    return total


def added(terms: Sequence[Payload], op: ReduceOp = "sum") -> Payload:
    """Return the sum (or maximum) of all ranks' payloads in rank order.

    The sum of element-wise payloads has their kind; the sum of other payloads is dense fp32. A maximum ("max") needs
    element-wise payloads.
    """
    if all(term.elementwise for term in terms):
        return terms[0].with_wire(sum_wires([term.wire for term in terms], op))
    return Dense(_sum_in_order(terms))


def _rounded(term: Payload, total: torch.Tensor) -> Payload:
    """Return a payload like `term`, which is element-wise, with the values of `total`, fp32 [numel]."""
    parts = torch.split(total, [leaf.numel for leaf in leaves(term)])
    values = [
        part.index_select(0, leaf.positions) if isinstance(leaf, IndexedValues) else part
        for leaf, part in zip(leaves(term), parts, strict=True)
    ]
    return term.with_wire(to_value_dtype(torch.cat(values), term.wire.dtype))


def _pieces(shards: Sequence[Shard], terms: Iterable[int]) -> list[Piece]:
    return [Piece(*shard.place[:2], frozenset(terms), shard.place[2]) for shard in shards]


def _union(terms: Sequence[Payload], total: torch.Tensor) -> Payload:
    """Return a sparse payload of those elements of `total`, fp32 [numel], that at least one of the payloads sends.

    Values have the dtype in which sums of the terms are sent; if the terms differ, the widest of their dtypes. If all
    terms have whole rows, so does the result.
    """
    by_rows = [term for term in terms if isinstance(term, RowSparse)]
    if len(by_rows) == len(terms):
        rows = torch.cat([term.rows for term in by_rows]).unique()
        values = total.view(-1, by_rows[0].row_numel)[rows]
        return RowSparse(total.numel(), rows, to_value_dtype(values, by_rows[0].values.dtype))
    untouched = torch.ones_like(total)
    for term in terms:
        term.clear_in_(untouched)
    indices = (untouched == 0).nonzero().view(-1)
    dtypes = [term.as_sparse().values.dtype if isinstance(term, IndexedValues) else torch.float32 for term in terms]
    return Sparse(
        total.numel(),
        indices,
        to_value_dtype(total.index_select(0, indices), functools.reduce(torch.promote_types, dtypes)),
    )
