"""Hierarchical: sum within groups of ranks, then among group leaders, then broadcast within the groups.

Source: the two-level scheme of Cho et al., "BlueConnect" (2019), and of the hierarchical all-reduce of NCCL and
Horovod, here with whole payloads. Ranks 0..group_size-1 form the first group, and so on; the last group may be smaller.
So groups match machines if each machine runs `group_size` consecutive ranks. The first rank of a group is its leader.
Only leaders send messages between groups. Options choose the collectives within groups and among leaders.

Bytes: those of `intra` within the group, those of `inter` among leaders, and the packed total, which is sent down a
binomial tree within the group.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Annotated

from typing_extensions import Doc, override

from collectives import options
from collectives.allreduce import Allgather, BoundAllgather
from collectives.base import BoundCollective, Collective, PendingSum, SumEncoder, without_residuals
from collectives.options import Count, Incompatible, OptionError
from collectives.payloads.base import Dense, KeepLost, Payload, unpack
from collectives.payloads.bundle import Bundle, UnreducedSum, members
from collectives.refusals import Refusal
from collectives.schedule.rounds import Layout
from collectives.transport import messages
from collectives.transport.base import ReduceOp, Transport


class BoundHierarchical(BoundCollective):
    """The collective `hierarchical` on one rank: sums within the rank's group and, on a group leader, among leaders."""

    options: Hierarchical

    def __init__(self, options: Hierarchical, transport: Transport, encoder: SumEncoder | None = None) -> None:
        super().__init__(options, transport)
        self._groups = options.groups(transport.world_size)
        self._group = transport.view(self._groups[transport.rank // options.group_size])
        self._intra = options.within.bind(self._group)
        leaders = [ranks.start for ranks in self._groups]
        self._inter = options.between.bind(transport.view(leaders)) if transport.rank in leaders else None

    @override
    def start_like(self, payload: Payload, layout: Layout, op: ReduceOp) -> PendingSum:
        total = self._intra.sum(payload, layout.key, op)
        if len(self._groups) == 1:
            return PendingSum.done(total)
        if self.options.keeps_kinds(layout):
            keep_lost = payload.keep_lost if self._inter is not None else None  # only the leader's total is used
            total = _merged(total, keep_lost)
            total.keep_lost = keep_lost
        elif self.options.gathers:
            return PendingSum.done(self._gathered(total, layout))
        else:
            total, layout = Dense(total.to_dense()), Layout.dense(layout.numel, key=layout.key)
        return PendingSum.done(self._among_groups(total, layout, op))

    @override
    def close(self) -> None:
        self._intra.close()
        if self._inter is not None:
            self._inter.close()

    def _among_groups(self, total: Payload, layout: Layout, op: ReduceOp) -> Payload:
        """Return the sum over all groups: group leaders add their groups' sums, `total`, and broadcast the result."""
        if self._inter is not None:
            # all leaders add the same rounded sums, so only one of them keeps the rounding errors
            keep_lost = total.keep_lost if self.transport.rank == 0 else None
            total = _merged(self._inter.start_like(total, layout, op).finish(), keep_lost)
        if layout.itemsize is not None:
            wire = total.wire
            messages.broadcast_wire_(self._group, wire, source=0)
            return total.with_wire(wire)
        packed = messages.pack(total, self._group) if self._inter is not None else None
        return unpack(messages.broadcast_bytes(self._group, packed, source=0))

    def _gathered(self, total: Payload, layout: Layout) -> Payload:
        """Return the payloads of all ranks as an `UnreducedSum`; `total` has the payloads of this rank's group.

        Each group leader sends the payloads of its group to the other leaders in a bundle.
        """
        packed = None
        if isinstance(self._inter, BoundAllgather):
            own = Bundle(total.terms if isinstance(total, UnreducedSum) else [total])
            bundles = self._inter.gather(own, Layout(layout.leaves * self.options.group_size))
            terms = [
                term
                for bundle, group in zip(bundles, self._groups, strict=True)
                for term in members(bundle, len(group) * [layout.numel])
            ]
            packed = messages.pack(Bundle(terms), self._group)
        bundle = unpack(messages.broadcast_bytes(self._group, packed, source=0))
        return UnreducedSum(members(bundle, self.transport.world_size * [layout.numel]))


@dataclasses.dataclass(kw_only=True)
class Hierarchical(Collective):
    """Sum within groups of ranks, then among group leaders; options choose the collective for each of the two.

    Attributes:
        within: the collective within a group.
        between: the collective among leaders.
    """

    bound = BoundHierarchical

    group_size: Annotated[
        Count, Doc("ranks per group; groups are consecutive ranks, so use the number of ranks per machine")
    ] = 2
    intra: Annotated[str, Doc("collective within a group")] = "ring"
    inter: Annotated[str, Doc("collective among the groups' leaders")] = "ring"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.within = self._part("intra", self.intra)
        self.between = self._part("inter", self.inter)
        self.finds_maxima = self.within.finds_maxima and self.between.finds_maxima

    def _part(self, role: str, name: str) -> Collective:
        try:
            part = options.build("collectives", Collective, name)
        except OptionError as error:
            raise OptionError(
                f"hierarchical: {role}={name} is not possible: {error} (only built-in collectives can be used here)"
            ) from None
        if isinstance(part, Hierarchical):
            raise OptionError(
                f"hierarchical: {role}={name} is not possible: hierarchical cannot be part of itself; choose another"
            )
        if part.recodes or part.keeps_residuals:
            raise OptionError(
                f"hierarchical: {role}={name} is not possible: its residuals need the layers of a training run; "
                f"use {without_residuals(part)}"
            )
        return part

    @override
    def check_compatible(self, kind: type[Payload]) -> None:
        with _naming("within a group"):
            self.within.check_compatible(kind)
        if kind.elementwise or (kind.addable and not self.within.decodes):
            with _naming("among leaders"):
                self.between.check_compatible(kind)

    @override
    def rank_refusals(self, world_size: int) -> list[Refusal]:
        groups = self.groups(world_size)
        parts = [("within a group", self.within, size) for size in sorted({len(group) for group in groups})]
        parts += [("among leaders", self.between, len(groups))]
        return [
            Refusal(each.applies, f"hierarchical: {where}, {each.reason}", [{"collective": "ring"}])
            for where, part, num_ranks in parts
            for each in part.rank_refusals(num_ranks)
        ]

    def groups(self, world_size: int) -> list[range]:
        """Return the ranks of each group, group by group."""
        everyone = range(world_size)
        return [everyone[first : first + self.group_size] for first in everyone[:: self.group_size]]

    def keeps_kinds(self, layout: Layout) -> bool:
        """Return True if the sum of a group consists of payloads of the same kinds as the payloads of its ranks.

        If False, the sum is decoded to a dense tensor before the group leaders exchange it.
        """
        return all(leaf.wire is not None or (leaf.addable and not self.within.decodes) for leaf in layout.leaves)

    @property
    def gathers(self) -> bool:
        """Return True if payloads that cannot be added are gathered: every rank gets the payloads of all ranks."""
        return self.within.leaves_terms and isinstance(self.between, Allgather)

    @override
    def rounds(self, world_size: int, rank: int, layout: Layout) -> None:
        """Return None, because the collectives `within` and `between` send the messages."""

    @override
    def expected_bytes(
        self, nbytes: int, world_size: int, rank: int, *, elementwise: bool = True, itemsize: int = 4
    ) -> float | None:
        if world_size == 1:
            return 0
        if not (elementwise and self.within.carries_wires and self.between.carries_wires):
            return None
        first = rank // self.group_size * self.group_size
        size, num_groups = min(self.group_size, world_size - first), -(-world_size // self.group_size)
        inner = self.within.expected_bytes(nbytes, size, rank - first, itemsize=itemsize)
        outer: float | None = 0
        if rank == first:
            outer = self.between.expected_bytes(nbytes, num_groups, rank // self.group_size, itemsize=itemsize)
        if inner is None or outer is None or num_groups == 1:
            return inner
        return inner + outer + nbytes * len(messages.binomial_links(rank - first, size)[1])


@contextlib.contextmanager
def _naming(part: str) -> Iterator[None]:
    """Put `part`, such as "within a group", before the message of an `Incompatible` raised in the `with` block."""
    try:
        yield
    except Incompatible as error:
        raise Incompatible(f"{part}, {error}") from None


def _merged(total: Payload, keep_lost: KeepLost | None) -> Payload:
    return total.merged(keep_lost) if isinstance(total, UnreducedSum) else total
