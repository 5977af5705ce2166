"""Hierarchical: sum within groups, then among their leaders, then spread within groups; two collectives of your choice.

Source: the two-level scheme of Cho et al., "BlueConnect" (2019) and of NCCL's and Horovod's hierarchical all-reduce,
with whole payloads. Ranks 0..group_size-1 form the first group and so on (the last may be smaller), so groups match
machines where each machine holds consecutive ranks; the first rank of a group leads it. Only leaders' traffic crosses
between groups.

Bytes: what `intra` sends in the group, what `inter` sends among leaders, and the packed total down a binomial tree
within the group.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Annotated, Literal, Self

from annotated_types import Ge
from typing_extensions import Doc

from collectives.allgather import Allgather
from collectives.base import Collective, Key
from collectives.payloads.base import Payload, unpack
from collectives.payloads.bundle import Bundle, members
from collectives.payloads.dense import Dense
from collectives.payloads.unreduced_sum import UnreducedSum
from collectives.transport import messages
from collectives.transport.base import ReduceOp, Transport

_LEAVE_TERMS = ("allgather", "pool")

Name = Literal["native", "ring", "halving_doubling", "tree", "allgather", "server", "pool"]


@dataclasses.dataclass(kw_only=True)
class Hierarchical(Collective):
    """Groups and their leaders."""

    group_size: Annotated[int, Ge(1), Doc("ranks per group; consecutive ranks, so best the ranks per machine")] = 2
    intra: Annotated[Name, Doc("collective within a group")] = "ring"
    inter: Annotated[Name, Doc("collective among the groups' leaders")] = "ring"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._intra, self._inter = _component(self.intra), _component(self.inter)

    def bind(self, transport: Transport) -> Self:
        """As the base class says."""
        n, size = transport.world_size, self.group_size
        first = transport.rank // size * size
        leaders = list(range(0, n, size))
        self._group = transport.view(range(first, min(first + size, n)))
        self._is_leader = transport.rank == first
        self._group_sizes = [min(leader + size, n) - leader for leader in leaders]
        self._intra.bind(self._group)
        if self._is_leader:
            self._inter.bind(transport.view(leaders))
        return super().bind(transport)

    @classmethod
    def refuses(cls, kind: type[Payload]) -> str | None:
        """What the default choice of collectives cannot add."""
        return cls().refusal(kind)

    def refusal(self, kind: type[Payload]) -> str | None:
        """What `intra` refuses, and what `inter` refuses of what leaves a group."""
        if reason := self._intra.refusal(kind):
            return f"within a group, {reason}"
        if self._stays_as_it_is(kind) and (reason := self._inter.refusal(kind)):
            return f"among leaders, {reason}"
        return None

    def sum_like(self, payload: Payload, key: Key, op: ReduceOp, *, layout: Payload) -> Payload:
        """As the base class says."""
        total = self._intra.sum(payload, key, op)
        if len(self._group_sizes) == 1:
            return total
        if all(self._stays_as_it_is(type(leaf)) for leaf in messages.leaves(layout)):
            return self._among_groups(_merged(total), key, op, layout)
        if self.intra in _LEAVE_TERMS and isinstance(self._inter, Allgather):
            return self._gathered(total)
        dense = Dense(total.to_dense())
        return self._among_groups(dense, key, op, dense)

    def _stays_as_it_is(self, kind: type[Payload]) -> bool:
        """Whether a group's total is of the kinds that its members add up to; else it is decoded before it goes on."""
        return kind.elementwise or (kind.addable and self.intra != "server")

    def _among_groups(self, total: Payload, key: Key, op: ReduceOp, layout: Payload) -> Payload:
        """A group's total -> the total of all groups, by way of its leader."""
        if self._is_leader:
            total = _merged(self._inter.sum_like(total, key, op, layout=layout))
        return self._spread(total, layout)

    def _spread(self, total: Payload, layout: Payload) -> Payload:
        """What the group's leader holds, on every rank of the group."""
        if layout.elementwise:
            wire = total.wire
            messages.spread_into(self._group, wire, source=0)
            return total.with_wire(wire)
        packed = messages.pack(total, self._group) if self._is_leader else None
        return unpack(messages.spread(self._group, packed, source=0))

    def _gathered(self, total: Payload) -> Payload:
        """Payloads that cannot be added: leaders exchange those of their groups unopened, as members of bundles."""
        packed, num_ranks = None, sum(self._group_sizes)
        if self._is_leader:
            packed = messages.pack(Bundle(self._terms_of_all_groups(_terms_of(total))), self._group)
        bundle = unpack(messages.spread(self._group, packed, source=0))
        return UnreducedSum(members(bundle, num_ranks * [total.numel]))

    def _terms_of_all_groups(self, terms: Sequence[Payload]) -> list[Payload]:
        assert isinstance(self._inter, Allgather)
        bound = max(self._group_sizes) * messages.bound_nbytes(terms[0])
        bundles = self._inter.gather(Bundle(terms), bound)
        return [
            term
            for bundle, size in zip(bundles, self._group_sizes, strict=True)
            for term in members(bundle, size * [terms[0].numel])
        ]

    def close(self) -> None:
        """As the base class says."""
        self._intra.close()
        if self._is_leader:
            self._inter.close()

    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        """What `intra` and, for leaders, `inter` send, and the total once per child in the group's binomial tree."""
        if world_size == 1:
            return 0
        if not (elementwise and self._intra.carries_wires and self._inter.carries_wires):
            return None
        first = rank // self.group_size * self.group_size
        size, num_groups = min(self.group_size, world_size - first), -(-world_size // self.group_size)
        inner = self._intra.expected_bytes(nbytes, size, rank - first, itemsize=itemsize)
        outer: float | None = 0
        if rank == first:
            outer = self._inter.expected_bytes(nbytes, num_groups, rank // self.group_size, itemsize=itemsize)
        if inner is None or outer is None or num_groups == 1:
            return inner
        return inner + outer + nbytes * len(messages.binomial_links(rank - first, size)[1])


def _component(name: Name) -> Collective:
    """A collective with its default options."""
    module = importlib.import_module(f"collectives.{name}")
    component: Collective = getattr(module, name.title().replace("_", ""))()
    return component


def _terms_of(total: Payload) -> Sequence[Payload]:
    return total.terms if isinstance(total, UnreducedSum) else [total]


def _merged(total: Payload) -> Payload:
    """One payload that can travel on."""
    return total.merged() if isinstance(total, UnreducedSum) else total
