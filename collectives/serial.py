"""The serial reference: what a collective must yield, computed by one process from the payloads of all ranks.

Each order of additions is written here as the collective's own module documents it and as plainly as it can be, and
shares no code with the rounds of the collectives, so that one can be held against the other bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from collectives.base import Collective
from collectives.hierarchical import Hierarchical
from collectives.payloads.base import HEADER_BYTES, Header, Payload
from collectives.payloads.bundle import Bundle
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.dense import Dense
from collectives.payloads.fields import VALUE_DTYPES, bytes_of
from collectives.payloads.row_sparse import RowSparse
from collectives.payloads.sparse import IndexedValues
from collectives.schedule.layout import leaves
from collectives.server import Server

Terms = Sequence[Payload]
"""One payload per rank."""
Order = Callable[[Terms, Payload], Payload]
"""(terms, the payload that says where to cut) -> their sum"""


def serial_sum(collective: Collective, payloads: Terms) -> torch.Tensor | None:
    """The sum in the collective's documented order of additions, rounded where it documents so.

    Args:
        collective: with its options.
        payloads: of all ranks, in rank order, such as the collective takes; left as they are.

    Returns:
        fp32 [numel], or None where the order is the backend's own or a compressor's encoding is part of the sum; then
        `error_bound` says how far the result may be off.
    """
    total = _total(collective, payloads, payloads[0])
    return None if total is None else total.to_dense()


def error_bound(payloads: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """(exact sum, how far any order of n - 1 rounded additions may be off), float64 [numel] each.

    The bound is n u sum|x| with u the unit roundoff of the type that travels: 0 for integers. Source: Higham, "Accuracy
    and stability of numerical algorithms" (2002), section 4.2.
    """
    dtypes = {_value_dtype(leaf) for leaf in leaves(payloads[0])}
    roundoff = max(torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 0.0 for dtype in dtypes)
    exact = torch.zeros(payloads[0].numel, dtype=torch.float64, device=payloads[0].device)
    magnitude = exact.clone()
    for payload in payloads:
        values = payload.to_dense().double()
        exact += values
        magnitude += values.abs()
    return exact, magnitude * (len(payloads) * roundoff)


def _total(collective: Collective, terms: Terms, layout: Payload) -> Payload | None:
    """The sum of some ranks' terms, cut as `layout` can be."""
    if len(terms) == 1:
        return terms[0]
    if isinstance(collective, Hierarchical):
        return _by_groups(collective, terms, layout)
    if isinstance(collective, Server):
        return _by_layer(collective, terms)
    order = _ORDERS.get(collective.component_name)
    if order is None or not (layout.elementwise and collective.carries_wires):
        return order and order(terms, layout)
    total = order([Dense(term.wire) for term in terms], Dense(layout.wire))
    return layout.with_wire(torch.cat([leaf.wire for leaf in leaves(total)]))


def _ring(terms: Terms, layout: Payload) -> Payload:
    """Chunk c: ((x_c + x_{c+1}) + x_{c+2}) + ... + x_{c+n-1}, ranks modulo n."""
    n = len(terms)
    chunks = []
    for chunk, (start, stop) in enumerate(itertools.pairwise(layout.borders(n))):
        chunks.append(_added([terms[(chunk + hop) % n].slice(start, stop) for hop in range(n)]))
    return Bundle(chunks)


def _halving_doubling(terms: Terms, layout: Payload) -> Payload:
    """S(r) = x_r + x_{r+p}, p the largest power of two up to n; then S(r) = S(r) + S(r xor d) for d = p/2, ..., 1.

    Chunk r is what S(r) holds of it.
    """
    p = 1 << (len(terms).bit_length() - 1)
    sums = [_added([*terms[r : r + 1], *terms[r + p : r + p + 1]]) for r in range(p)]
    distance = p // 2
    while distance:
        sums = [sums[r].add(sums[r ^ distance]) for r in range(p)]
        distance //= 2
    borders = layout.borders(p)
    return Bundle([sums[r].slice(borders[r], borders[r + 1]) for r in range(p)])


def _tree(terms: Terms, layout: Payload) -> Payload:
    """S(r) = (x_r + S(2r+1)) + S(2r+2), from rank 0."""

    def subtree(rank: int) -> Payload:
        return _added([terms[rank], *(subtree(child) for child in (2 * rank + 1, 2 * rank + 2) if child < len(terms))])

    return subtree(0)


def _at_one_place(terms: Terms, layout: Payload) -> Payload:
    """Added in rank order in fp32 (integers in their own type), rounded once where the sum is of the terms' type."""
    if not layout.elementwise:
        return _decoded(terms)
    wires = [term.wire for term in terms]
    dtype = wires[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return layout.with_wire(to_value_dtype(functools.reduce(torch.add, [wire.to(wide) for wire in wires]), dtype))


def _decoded(terms: Terms, layout: Payload | None = None) -> Payload:
    """Decoded and added in rank order in fp32."""
    return Dense(functools.reduce(torch.add, [term.to_dense() for term in terms]))


_ORDERS: dict[str, Order] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "pool": _at_one_place,
    "allgather": _decoded,
}


def _by_layer(server: Server, terms: Terms) -> Payload | None:
    """Each layer at its server; a union in the terms' value type."""
    answers = []
    for of_layer in zip(*map(leaves, terms), strict=True):
        answer = _at_one_place(of_layer, of_layer[0])
        if not of_layer[0].elementwise and server.recodes:
            return None
        if server.downlink == "union" and isinstance(of_layer[0], (IndexedValues, RowSparse)):
            answer = Dense(to_value_dtype(answer.to_dense(), _value_dtype(of_layer[0])))
        answers.append(answer)
    return answers[0] if len(answers) == 1 else Bundle(answers)


def _by_groups(collective: Hierarchical, terms: Terms, layout: Payload) -> Payload | None:
    """The `intra` collective in each group, the `inter` collective over the groups' totals."""
    size = collective.group_size
    groups = [terms[start : start + size] for start in range(0, len(terms), size)]
    if len(groups) == 1:
        return _total(collective.within, terms, layout)
    within, between = collective.within.component_name, collective.between.component_name
    is_kept = all(leaf.elementwise or (leaf.addable and within != "server") for leaf in leaves(layout))
    if not is_kept and between == "allgather" and within in ("allgather", "pool"):
        return _decoded(terms)
    totals = []
    for group in groups:
        sum_of = _as_one_payload if is_kept else _total
        total = sum_of(collective.within, group, layout)
        if total is None:
            return None
        totals.append(total if is_kept else Dense(total.to_dense()))
    return _as_one_payload(collective.between, totals, layout if is_kept else totals[0])


def _as_one_payload(collective: Collective, terms: Terms, layout: Payload) -> Payload | None:
    """A total that can travel on: what would be left as terms is added in rank order."""
    leaves_terms = collective.component_name == "allgather" or (
        collective.component_name == "pool" and not layout.elementwise
    )
    return _added(terms) if leaves_terms else _total(collective, terms, layout)


def _added(terms: Terms) -> Payload:
    return functools.reduce(lambda total, term: total.add(term), terms)


def _value_dtype(payload: Payload) -> torch.dtype:
    """The value type that a payload's header names."""
    return VALUE_DTYPES[Header.from_bytes(bytes_of(payload.pack(), slice(HEADER_BYTES))).dtype]
