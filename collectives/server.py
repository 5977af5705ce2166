"""Server: every rank pushes its payload to a parameter server, which sums in rank order and answers everybody.

Source: Li et al., "Scaling distributed machine learning with the parameter server" (OSDI 2014); per-layer keys and the
splitting of big arrays as in MXNet's KVStore. Ranks are workers and servers at once: one of them serves (colocated), or
each serves the layers whose id is its rank modulo n and its share of every layer longer than `split_numel` (sharded).
The sum is taken in fp32 in rank order (integers in their own type). Element-wise payloads come back as what they were;
others as the downlink says: `dense` all elements in fp32, `union` only elements that some rank sent, `recode` encoded
again, the server keeping what that lost.

Bytes: packed payloads. A worker pushes each part once to its server (its own server's share costs nothing); a server
answers n-1 times. With one server, a dense downlink and an uplink c times smaller than dense, all traffic together
falls by less than 2 however large c is.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self

import torch
from annotated_types import Ge
from typing_extensions import Doc

from collectives.base import Collective, Key
from collectives.options import OptionError
from collectives.payloads.base import Payload, unpack
from collectives.payloads.bundle import Bundle, members
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.dense import Dense
from collectives.payloads.indexed_values import IndexedValues
from collectives.payloads.row_sparse import RowSparse
from collectives.payloads.sparse import Sparse
from collectives.transport import messages
from collectives.transport.arithmetic import sum_in_order, sum_wires
from collectives.transport.base import ReduceOp, Transport

PartKey = tuple[Key, int]
"""(ids of the layers inside, which part of them)"""
Recode = Callable[[torch.Tensor, Key], Payload]
"""(fp32 sum of a layer or flat bucket, ids of the layers inside) -> what to answer"""


@dataclasses.dataclass(frozen=True)
class Part:
    """What one server sums at a time: a layer, a piece of a long one, or a whole flat bucket.

    Attributes:
        key: names the server's state for it.
        server: the rank that serves it.
        payload: this rank's contribution.
    """

    key: PartKey
    server: int
    payload: Payload


@dataclasses.dataclass(frozen=True)
class _Pushed:
    """A push that waits for its pull: own parts, what came from every rank for the parts served here, message bound."""

    parts: list[Part]
    inbox: dict[int, list[Payload]]
    bound: int


@dataclasses.dataclass(kw_only=True)
class Server(Collective):
    """Workers push, a server sums, workers pull.

    Attributes:
        recode: encodes a sum for `downlink=recode`; set by whoever runs the server.
    """

    carries_wires = False

    placement: Annotated[Literal["colocated", "sharded"], Doc("one rank serves, or all of them share the layers")] = (
        "colocated"
    )
    root: Annotated[int, Ge(0), Doc("the rank that serves when colocated")] = 0
    downlink: Annotated[
        Literal["dense", "union", "recode"],
        Doc("answer with all elements, with those that some rank sent, or encoded by the run's compressor"),
    ] = "dense"
    split_numel: Annotated[int, Ge(1), Doc("elements beyond which all servers share a layer, when sharded")] = 1_000_000

    def __post_init__(self) -> None:
        super().__post_init__()
        self.recode: Recode | None = None

    def bind(self, transport: Transport) -> Self:
        """As the base class says."""
        if reason := self.ranks_refusal(transport.world_size):
            raise OptionError(reason)
        self._pushed: dict[Key, _Pushed] = {}
        self._residuals: dict[PartKey, torch.Tensor] = {}
        self._proposed: dict[PartKey, torch.Tensor] = {}
        return super().bind(transport)

    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """Nothing: what cannot be added as it is, is decoded first."""
        return None

    def ranks_refusal(self, world_size: int) -> str | None:
        """A root that is no rank."""
        if self.root < world_size:
            return None
        return f"server: root={self.root} is none of the {world_size} ranks, which count from 0; lower it"

    def sum_like(self, payload: Payload, key: Key, op: ReduceOp, *, layout: Payload) -> Payload:
        """As the base class says."""
        self.push(key, payload, layout=layout)
        return self.pull(key, op)

    def push(self, key: Key, payload: Payload, *, layout: Payload | None = None) -> None:
        """Send every server its part of this rank's payload, and on a server take everybody's; every rank must call."""
        layout = payload if layout is None else layout
        parts = self._cut(payload, key, layout)
        transport = self.transport
        bound = messages.bound_nbytes(layout)
        sends = []
        for server in sorted({part.server for part in parts} - {transport.rank}):
            sends.append((messages.pack(_joined(parts, server), transport, bound), server))
        own = [part.payload for part in parts if part.server == transport.rank]
        workers = [rank for rank in range(transport.world_size) if rank != transport.rank] if own else []
        buffers = transport.exchange(sends, [(bound, worker) for worker in workers])
        inbox = {worker: _opened(buffer, own) for worker, buffer in zip(workers, buffers, strict=True)}
        inbox[transport.rank] = own
        self._pushed[key] = _Pushed(parts, inbox, bound)

    def pull(self, key: Key, op: ReduceOp = "sum") -> Payload:
        """The sum of what all ranks pushed for `key`; every rank must call, after `push`."""
        pushed, transport = self._pushed.pop(key), self.transport
        parts, bound = pushed.parts, pushed.bound
        answers: dict[int, torch.Tensor] = {}
        own = [part for part in parts if part.server == transport.rank]
        if own:
            by_part = zip(*(pushed.inbox[rank] for rank in range(transport.world_size)), strict=True)
            totals = [self._total(part.key, list(terms), op) for part, terms in zip(own, by_part, strict=True)]
            answers[transport.rank] = messages.pack(_together(totals), transport, bound)
        servers = sorted({part.server for part in parts} - {transport.rank})
        workers = [rank for rank in range(transport.world_size) if rank != transport.rank]
        sends = [(packed, worker) for packed in answers.values() for worker in workers]
        buffers = transport.exchange(sends, [(bound, server) for server in servers])
        answers.update(zip(servers, buffers, strict=True))
        opened = {
            server: iter(_opened(answer, [part.payload for part in parts if part.server == server]))
            for server, answer in answers.items()
        }
        return _together([next(opened[part.server]) for part in parts])

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """Colocated: the payload once from each worker, and n-1 answers of its size where it is element-wise."""
        if world_size == 1:
            return 0
        if self._is_sharded:
            return None
        if rank != self.root:
            return nbytes
        return (world_size - 1) * nbytes if elementwise else None

    def commit(self) -> None:
        """The residuals of the answers become the ones that the next answers start from."""
        self._residuals.update(self._proposed)
        self.drop()

    def drop(self) -> None:
        """The step did not happen: residuals are what they were before it."""
        self._proposed.clear()

    def state_dict(self) -> dict[str, Any]:
        """Residuals of this rank's answers, by part."""
        return {"residuals": {key: residual.clone() for key, residual in self._residuals.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._residuals = {key: residual.clone() for key, residual in state["residuals"].items()}

    @property
    def _is_sharded(self) -> bool:
        return self.placement == "sharded"

    def _cut(self, payload: Payload, key: Key, layout: Payload) -> list[Part]:
        """One part per layer where the payload is a bundle of layers, else one; long ones in pieces if sharded."""
        units = messages.leaves(layout)
        keys: list[Key] = [(layer_id,) for layer_id in key]
        if len(units) != len(keys):
            units, keys = [layout], [key]
        own = units if payload is layout else members(payload, [unit.numel for unit in units])
        n = self.transport.world_size
        parts = []
        for unit, unit_key, contribution in zip(units, keys, own, strict=True):
            # a layer that is encoded again stays whole: its compressor looks at its shape
            is_split = self._is_sharded and unit.numel > self.split_numel and self.downlink != "recode"
            for index, (start, stop) in enumerate(itertools.pairwise(unit.borders(n if is_split else 1))):
                server = (unit_key[0] + index) % n if self._is_sharded else self.root
                piece = contribution.slice(start, stop) if is_split else contribution
                parts.append(Part((unit_key, index), server, piece))
        return parts

    def _total(self, key: PartKey, terms: Sequence[Payload], op: ReduceOp) -> Payload:
        """The answer for one part: the terms of all ranks added in rank order."""
        if self.downlink == "dense" or all(term.elementwise for term in terms):
            return added(terms, op)
        total = sum_in_order(terms)
        if self.downlink == "union":
            return _union(terms, total)
        return self._recoded(key, total)

    def _recoded(self, key: PartKey, total: torch.Tensor) -> Payload:
        if self.recode is None:
            raise OptionError("server: downlink=recode needs the run's compressor; use downlink=dense or union")
        residual = self._residuals.get(key)
        if residual is not None:
            total += residual
        payload = self.recode(total, key[0])
        payload.subtract_from_(total)
        self._proposed[key] = total
        return payload


def added(terms: Sequence[Payload], op: ReduceOp = "sum") -> Payload:
    """All ranks' payloads in rank order: what they were where they are element-wise, else dense in fp32."""
    if all(term.elementwise for term in terms):
        return terms[0].with_wire(sum_wires([term.wire for term in terms], op))
    return Dense(sum_in_order(terms))


def _together(payloads: Sequence[Payload]) -> Payload:
    return payloads[0] if len(payloads) == 1 else Bundle(payloads)


def _joined(parts: Sequence[Part], server: int) -> Payload:
    return _together([part.payload for part in parts if part.server == server])


def _opened(buffer: torch.Tensor, like: Sequence[Payload]) -> list[Payload]:
    """The payloads of one message, one for each of `like`."""
    return members(unpack(buffer), [payload.numel for payload in like])


def _union(terms: Sequence[Payload], total: torch.Tensor) -> Payload:
    """The elements of `total` [numel] that some term transmits, in the terms' value type."""
    if all(isinstance(term, RowSparse) for term in terms):
        by_rows = [term for term in terms if isinstance(term, RowSparse)]
        rows = torch.cat([term.rows for term in by_rows]).unique()
        values = total.view(-1, by_rows[0].row_numel)[rows]
        return RowSparse(total.numel(), rows, to_value_dtype(values, by_rows[0].values.dtype))
    untouched = torch.ones_like(total)
    for term in terms:
        term.clear_in_(untouched)
    indices = (untouched == 0).nonzero().view(-1)
    dtypes = [term.values.dtype if isinstance(term, IndexedValues) else torch.float32 for term in terms]
    return Sparse(
        total.numel(),
        indices,
        to_value_dtype(total.index_select(0, indices), functools.reduce(torch.promote_types, dtypes)),
    )
