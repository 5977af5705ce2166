"""Serial reference: the result that a collective must return, computed in one process from all ranks' payloads.

For each collective, the terms are added in the order that the collective's module documents. This module shares no code
with the rounds of the collectives, so that comparing both results bit for bit is an independent check.
"""

import functools
from collections.abc import Callable, Sequence

import torch

from collectives.base import Collective
from collectives.hierarchical import Hierarchical
from collectives.payloads.base import Dense, Payload
from collectives.payloads.bundle import Bundle
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.fields import HEADER, VALUE_DTYPES, Reader
from collectives.payloads.group_sparse import RowSparse
from collectives.payloads.sparse import IndexedValues
from collectives.schedule.rounds import Layout, leaves
from collectives.server import Server

Terms = Sequence[Payload]  # one payload per rank
Order = Callable[[Terms, Payload], Payload]  # (terms, a payload that tells where to cut them) -> sum of the terms


def serial_sum(collective: Collective, payloads: Terms) -> torch.Tensor | None:
    """Return the sum of all ranks' payloads, added and rounded as the collective's module documents.

    Args:
        collective: the collective, with its options.
        payloads: the payloads of all ranks, in rank order, of a kind that the collective supports; not modified.

    Returns:
        fp32 [numel]. None if the backend determines the order of additions, or if a compressor encodes the sum; use
        `error_bound` then.
    """
    total = _total(collective, payloads, payloads[0])
    return None if total is None else total.to_dense()


def error_bound(payloads: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact sum of n payloads, and a bound on the error of n - 1 rounded additions in any order.

    Both are float64 [numel]. The bound is n u sum|x|, where u is the unit roundoff of the dtype in which values are
    sent (0 for integers).

    Source: Higham, "Accuracy and stability of numerical algorithms" (2002), section 4.2.
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
    """Return the collective's sum of some ranks' payloads, as one payload.

    Return None if the backend determines the order of additions, or if a compressor encodes the sum.

    Args:
        collective: the collective, with its options.
        terms: the payloads in rank order.
        layout: a payload whose sizes determine where all payloads are cut into chunks.
    """
    if len(terms) == 1:
        return terms[0]
    if isinstance(collective, Hierarchical):
        return _by_groups(collective, terms, layout)
    if isinstance(collective, Server):
        return _by_layer(collective, terms)
    if collective.recodes and not layout.elementwise:
        return None
    order = _ORDERS.get(collective.component_name)
    if order is None or not (layout.elementwise and collective.carries_wires):
        return order and order(terms, layout)
    total = order([Dense(term.wire) for term in terms], Dense(layout.wire))
    return layout.with_wire(torch.cat([leaf.wire for leaf in leaves(total)]))


def _ring(terms: Terms, layout: Payload) -> Payload:
    """Return the sum of all terms x; in chunk c it is ((x_c + x_{c+1}) + ...) + x_{c+n-1}, with ranks modulo n."""
    n = len(terms)
    chunks = enumerate(Layout.of(layout).cuts(n))
    return Bundle(
        [_added([terms[(c + hop) % n].slice(start, stop) for hop in range(n)]) for c, (start, stop) in chunks]
    )


def _halving_doubling(terms: Terms, layout: Payload) -> Payload:
    """Return the sum of all terms x; chunk r of the result is chunk r of S(r), for r = 0..p-1.

    Here p is the largest power of two up to the number of ranks. S(r) starts as x_r + x_{r+p}, or as x_r if there is no
    rank r+p. Then, for d = p/2, ..., 2, 1, every S(r) becomes S(r) + S(r xor d).
    """
    p = 1 << (len(terms).bit_length() - 1)
    sums = [_added([*terms[r : r + 1], *terms[r + p : r + p + 1]]) for r in range(p)]
    distance = p // 2
    while distance:
        sums = [sums[r].add(sums[r ^ distance]) for r in range(p)]
        distance //= 2
    return Bundle([chunk.slice(*cut) for chunk, cut in zip(sums, Layout.of(layout).cuts(p), strict=True)])


def _tree(terms: Terms, layout: Payload) -> Payload:
    """Return the sum S(0) of all terms x, where S(r) = (x_r + S(2r+1)) + S(2r+2) is the sum of rank r's subtree."""

    def subtree(rank: int) -> Payload:
        return _added([terms[rank], *(subtree(child) for child in (2 * rank + 1, 2 * rank + 2) if child < len(terms))])

    return subtree(0)


def _at_one_place(terms: Terms, layout: Payload) -> Payload:
    """Return the sum of all ranks' payloads in rank order, computed in fp32 (integers: in their own dtype).

    The sum of element-wise payloads is rounded once to their dtype; the sum of other payloads is dense fp32.
    """
    if not layout.elementwise:
        return _decoded(terms)
    wires = [term.wire for term in terms]
    dtype = wires[0].dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    return layout.with_wire(to_value_dtype(functools.reduce(torch.add, [wire.to(wide) for wire in wires]), dtype))


def _decoded(terms: Terms, layout: Payload | None = None) -> Payload:
    """Decode all ranks' payloads, `terms`, and return their sum in rank order as dense fp32."""
    return Dense(functools.reduce(torch.add, [term.to_dense() for term in terms]))


def _by_owner(terms: Terms, layout: Payload) -> Payload:
    """Return the sum of all ranks' payloads in rank order; the sum of element-wise payloads is rounded once."""
    if not all(leaf.elementwise for leaf in leaves(layout)):
        return _added(terms)
    return Bundle([_at_one_place(of_leaf, of_leaf[0]) for of_leaf in zip(*map(leaves, terms), strict=True)])


_ORDERS: dict[str, Order] = {
    "ring": _ring,
    "halving_doubling": _halving_doubling,
    "tree": _tree,
    "pool": _at_one_place,
    "allgather": _decoded,
    "direct": _by_owner,
}


def _by_layer(server: Server, terms: Terms) -> Payload | None:
    """Return the sum of the terms as the server adds them, layer by layer; None if a compressor encodes the sum.

    With `downlink=union`, sums are rounded to the value dtype of the terms.
    """
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
    """Return the sum of collective `hierarchical`: by `intra` in each group, then by `inter` over the groups' totals.

    Return None if the backend determines the order of additions.
    """
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
        total = (_as_one_payload if is_kept else _total)(collective.within, group, layout)
        if total is None:
            return None
        totals.append(total if is_kept else Dense(total.to_dense()))
    return _as_one_payload(collective.between, totals, layout if is_kept else totals[0])


def _as_one_payload(collective: Collective, terms: Terms, layout: Payload) -> Payload | None:
    """Return the collective's sum as one payload; if the collective only gathers the terms, add them in rank order."""
    leaves_terms = collective.component_name == "allgather" or (
        collective.component_name == "pool" and not layout.elementwise
    )
    return _added(terms) if leaves_terms else _total(collective, terms, layout)


def _added(terms: Terms) -> Payload:
    return functools.reduce(lambda total, term: total.add(term), terms)


def _value_dtype(payload: Payload) -> torch.dtype:
    _, _, number, *_ = Reader(payload.pack()).numbers(HEADER)
    return VALUE_DTYPES[int(number)]
