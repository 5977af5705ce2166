"""What every collective must return and send, computed in one process from the documented orders, chunk by chunk.

Nothing here shares code with the collectives' schedules: these go rank by rank.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from collectives.base import Collective
from collectives.hierarchical import Hierarchical
from collectives.payloads import Bundle, Dense, RowSparse, Sparse
from collectives.payloads.base import Payload
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.indexed_values import IndexedValues
from collectives.rounds.layout import leaves
from collectives.server import Server


@dataclasses.dataclass
class Outcome:
    """The total, and the bytes that each rank sends for it; None where this page has no opinion."""

    total: Payload
    sent: list[int] | None


def serial(collective: Collective, payloads: Sequence[Payload], layout: Payload | None = None) -> Outcome:
    """The outcome of `collective.sum` when rank r contributes payloads[r]."""
    layout = payloads[0] if layout is None else layout
    if len(payloads) == 1:
        return Outcome(payloads[0], [0])
    if isinstance(collective, Hierarchical):
        return hierarchical(collective, payloads, layout)
    if isinstance(collective, Server):
        return server(collective, payloads)
    by_name: dict[str, Callable[[Sequence[Payload], Payload], Outcome]] = {
        "ring": ring,
        "tree": tree,
        "halving_doubling": halving_doubling,
        "allgather": allgather,
        "pool": pool,
        "native": native,
    }
    function = by_name[collective.component_name]
    if collective.carries_wires and layout.elementwise and collective.component_name != "pool":
        bare = function([Dense(payload.wire) for payload in payloads], Dense(layout.wire))
        return Outcome(layout.with_wire(torch.cat([leaf.wire for leaf in leaves(bare.total)])), bare.sent)
    return function(payloads, layout)


def ring(payloads: Sequence[Payload], layout: Payload) -> Outcome:
    """Chunk c starts on rank c, is summed along the ring, and from rank c-1 travels round once more."""
    n = len(payloads)
    sent, totals = [0] * n, []
    borders = layout.borders(n)
    for c in range(n):
        pieces = [payload.slice(borders[c], borders[c + 1]) for payload in payloads]
        total = pieces[c]
        for hop in range(1, n):
            sent[(c + hop - 1) % n] += _length(total, layout)
            total = total.add(pieces[(c + hop) % n])
        for hop in range(n - 1):
            sent[(c - 1 + hop) % n] += _length(total, layout)
        totals.append(total)
    return Outcome(Bundle(totals), sent)


def tree(payloads: Sequence[Payload], layout: Payload) -> Outcome:
    """S(r) = (x_r + S(2r+1)) + S(2r+2)."""
    n = len(payloads)
    sent = [0] * n

    def subtree(rank: int) -> Payload:
        total = payloads[rank]
        for child in (2 * rank + 1, 2 * rank + 2):
            if child < n:
                total = total.add(subtree(child))
        if rank:
            sent[rank] += _length(total, layout)
        return total

    total = subtree(0)
    for rank in range(1, n):
        sent[(rank - 1) // 2] += _length(total, layout)
    return Outcome(total, sent)


def halving_doubling(payloads: Sequence[Payload], layout: Payload) -> Outcome:
    """S(r) = x_r + x_{r+p}, then S(r) + S(r xor d) for d = p/2 .. 1, each on the half that it keeps; then back."""
    n = len(payloads)
    p = 2 ** (n.bit_length() - 1)
    sent = [0] * n
    sums = list(payloads[:p])
    for extra in range(p, n):
        sent[extra] += _length(payloads[extra], layout)
        sums[extra - p] = sums[extra - p].add(payloads[extra])
    borders = layout.borders(p)
    width = p
    while width > 1:  # chunks that a rank still sums; they start at a multiple of their number
        width //= 2
        halves = []
        for rank, total in enumerate(sums):
            start = rank // (2 * width) * 2 * width
            middle = borders[start + width] - borders[start]
            lower, upper = total.slice(0, middle), total.slice(middle, total.numel)
            halves.append((upper, lower) if rank & width else (lower, upper))
        sent = [s + (_length(halves[rank][1], layout) if rank < p else 0) for rank, s in enumerate(sent)]
        sums = [kept.add(halves[rank ^ width][1]) for rank, (kept, _) in enumerate(halves)]
    while width < p:
        for rank in range(p):
            first = rank // width * width
            sent[rank] += _joined_length(sums[first : first + width], layout)
        width *= 2
    for extra in range(p, n):
        sent[extra - p] += _joined_length(sums, layout)
    return Outcome(Bundle(sums), sent)


def allgather(payloads: Sequence[Payload], layout: Payload) -> Outcome:
    """Added in rank order in fp32."""
    return Outcome(Dense(_in_rank_order(payloads)), [(len(payloads) - 1) * payload.nbytes for payload in payloads])


def pool(payloads: Sequence[Payload], layout: Payload) -> Outcome:
    """Added in rank order, in fp32, rounded once at the end where the result is of the payload's type."""
    if layout.elementwise:
        wires = [payload.wire for payload in payloads]
        return Outcome(layout.with_wire(_wires_in_rank_order(wires)), [wire.nbytes for wire in wires])
    return Outcome(Dense(_in_rank_order(payloads)), [payload.nbytes for payload in payloads])


def native(payloads: Sequence[Payload], layout: Payload) -> Outcome:
    """Exact for integers; floats are compared within bounds."""
    n = len(payloads)
    return Outcome(_folded(payloads), [round(2 * (n - 1) / n * _length(payload, layout)) for payload in payloads])


def server(collective: Server, payloads: Sequence[Payload]) -> Outcome:
    """Added in rank order in fp32; element-wise payloads rounded once, others answered as the downlink says."""
    units = [leaves(payload) for payload in payloads]
    answers = [_answer(collective, terms) for terms in zip(*units, strict=True)]
    total = answers[0] if len(answers) == 1 else Bundle(answers)
    sent = None
    if collective.placement == "colocated":
        sent = [payload.nbytes for payload in payloads]
        sent[collective.root] = (len(payloads) - 1) * total.nbytes
    return Outcome(total, sent)


def hierarchical(collective: Hierarchical, payloads: Sequence[Payload], layout: Payload) -> Outcome:
    """The intra collective in each group, the inter collective over the groups' totals."""
    n, size = len(payloads), collective.group_size
    groups = [payloads[start : start + size] for start in range(0, n, size)]
    if len(groups) == 1:
        return serial(collective.within, payloads, layout)
    if all(leaf.elementwise or (leaf.addable and collective.intra != "server") for leaf in leaves(layout)):
        totals = [_as_one_payload(collective.within, group, layout) for group in groups]
        return Outcome(_as_one_payload(collective.between, totals, layout), None)
    if collective.intra == collective.inter == "allgather":
        return Outcome(Dense(_in_rank_order(payloads)), None)
    decoded = [Dense(serial(collective.within, group, layout).total.to_dense()) for group in groups]
    return Outcome(serial(collective.between, decoded, decoded[0]).total, None)


def _as_one_payload(collective: Collective, payloads: Sequence[Payload], layout: Payload) -> Payload:
    """A total that can travel on: what would be left as terms is added in rank order."""
    leaves_terms = collective.component_name == "allgather" or (
        collective.component_name == "pool" and not layout.elementwise
    )
    return _folded(payloads) if leaves_terms else serial(collective, payloads, layout).total


def _folded(payloads: Sequence[Payload]) -> Payload:
    return functools.reduce(lambda a, b: a.add(b), payloads)


def _answer(collective: Server, terms: Sequence[Payload]) -> Payload:
    if all(term.elementwise for term in terms):
        return terms[0].with_wire(_wires_in_rank_order([term.wire for term in terms]))
    total = _in_rank_order(terms)
    if collective.downlink == "dense":
        return Dense(total)
    mask = torch.ones_like(total)
    for term in terms:
        term.clear_in_(mask)
    first = terms[0]
    if isinstance(first, RowSparse):
        rows = (mask.view(-1, first.row_numel)[:, 0] == 0).nonzero().view(-1)
        return RowSparse(total.numel(), rows, to_value_dtype(total.view(-1, first.row_numel)[rows], first.values.dtype))
    dtype = first.values.dtype if isinstance(first, IndexedValues) else torch.float32
    indices = (mask == 0).nonzero().view(-1)
    return Sparse(total.numel(), indices, to_value_dtype(total[indices], dtype))


def _in_rank_order(payloads: Sequence[Payload]) -> torch.Tensor:
    total = torch.zeros(payloads[0].numel)
    for payload in payloads:
        total = total + payload.to_dense()
    return total


def _wires_in_rank_order(wires: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = wires[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    total = wires[0].to(wide)
    for wire in wires[1:]:
        total = total + wire.to(wide)
    return to_value_dtype(total, dtype) if dtype.is_floating_point else total


def _is_bare(layout: Payload) -> bool:
    return isinstance(layout, Dense)


def _length(payload: Payload, layout: Payload) -> int:
    """Bytes of a message: dense tensors travel without headers."""
    return payload.wire.nbytes if _is_bare(layout) else payload.nbytes


def _joined_length(parts: Sequence[Payload], layout: Payload) -> int:
    """Bytes of several neighbouring parts in one message."""
    if _is_bare(layout):
        return sum(part.wire.nbytes for part in parts)
    return parts[0].nbytes if len(parts) == 1 else Bundle(parts).nbytes
