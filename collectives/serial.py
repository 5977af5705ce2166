"""The serial reference: what a collective must yield, computed by one process from the payloads of all ranks.

Each order of additions is written here as the collective's own module documents it and as plainly as it can be, on
whole tensors and without sharing code with the collectives, so that one can be held against the other bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch

from collectives.base import Collective
from collectives.hierarchical import Hierarchical
from collectives.payloads.base import HEADER_BYTES, Header, Payload, balanced_borders
from collectives.payloads.codec.values import to_value_dtype
from collectives.payloads.fields import VALUE_DTYPES
from collectives.payloads.indexed_values import IndexedValues
from collectives.payloads.row_sparse import RowSparse
from collectives.rounds.layout import leaves

Rows = Sequence[torch.Tensor]
"""One 1-D tensor per rank, in the type that travels."""
Cut = Callable[[int], list[int]]
"""Number of parts -> borders at which the collective cuts."""
Order = Callable[[Rows, Cut], torch.Tensor]


def serial_sum(collective: Collective, payloads: Sequence[Payload]) -> torch.Tensor | None:
    """The sum in the collective's documented order of additions, rounded where it documents so.

    Args:
        collective: with its options; need not be bound.
        payloads: of all ranks, in rank order; left as they are.

    Returns:
        fp32 [numel], or None where the order is the backend's own or no order is documented for such payloads; then
        `error_bound` says how far the result may be off.
    """
    if collective.component_name in ("allgather", "pool", "server"):
        return _sum_at_one_place(collective, payloads)
    order = _order_of(collective)
    if order is None:
        return None
    first = payloads[0]
    if first.elementwise:
        wires = [payload.wire for payload in payloads]
        total = order(wires, functools.partial(balanced_borders, wires[0].numel()))
        return first.with_wire(total).to_dense()
    if not isinstance(first, (IndexedValues, RowSparse)):
        return None
    rows = [payload.to_dense().to(_value_dtype(payload)) for payload in payloads]
    return order(rows, first.borders).float()


def error_bound(payloads: Sequence[Payload]) -> tuple[torch.Tensor, torch.Tensor]:
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


def _ring(rows: Rows, cut: Cut) -> torch.Tensor:
    """Chunk c: ((x_c + x_{c+1}) + x_{c+2}) + ... + x_{c+n-1}, ranks modulo n."""
    n = len(rows)
    chunks = []
    for chunk, (start, stop) in enumerate(itertools.pairwise(cut(n))):
        terms = [rows[(chunk + step) % n][start:stop] for step in range(n)]
        chunks.append(functools.reduce(_add, terms))
    return torch.cat(chunks)


def _halving_doubling(rows: Rows, cut: Cut) -> torch.Tensor:
    """S(r) = x_r + x_{r+p}, p the largest power of two up to n; then S(r) = S(r) + S(r xor d) for d = p/2, ..., 1."""
    p = 1 << (len(rows).bit_length() - 1)
    sums = [_add(rows[r], rows[r + p]) if r + p < len(rows) else rows[r] for r in range(p)]
    distance = p // 2
    while distance:
        sums = [_add(sums[r], sums[r ^ distance]) for r in range(p)]
        distance //= 2
    return sums[0]


def _tree(rows: Rows, cut: Cut) -> torch.Tensor:
    """S(r) = (x_r + S(2r+1)) + S(2r+2), from rank 0."""

    def total(rank: int) -> torch.Tensor:
        children = [total(child) for child in (2 * rank + 1, 2 * rank + 2) if child < len(rows)]
        return functools.reduce(_add, children, rows[rank])

    return total(0)


_ORDERS: dict[str, Order] = {"ring": _ring, "halving_doubling": _halving_doubling, "tree": _tree}


def _order_of(collective: Collective) -> Order | None:
    """How a collective that adds on the way orders its additions; None where that is not known."""
    if not isinstance(collective, Hierarchical):
        return _ORDERS.get(collective.component_name)
    intra, inter = _ORDERS.get(collective.intra), _ORDERS.get(collective.inter)
    if intra is None or inter is None:
        return None
    size = collective.group_size

    def by_groups(rows: Rows, cut: Cut) -> torch.Tensor:
        groups = [rows[start : start + size] for start in range(0, len(rows), size)]
        return inter([intra(group, cut) for group in groups], cut)

    return by_groups


def _sum_at_one_place(collective: Collective, payloads: Sequence[Payload]) -> torch.Tensor | None:
    """All payloads added in rank order in fp32 (integers in their own type), rounded once where the sum travels on."""
    first = payloads[0]
    if first.elementwise and collective.component_name != "allgather":
        wires = [payload.wire for payload in payloads]
        total = functools.reduce(torch.add, [wire.to(_wide(wire.dtype)) for wire in wires])
        return first.with_wire(to_value_dtype(total, wires[0].dtype)).to_dense()
    total = functools.reduce(torch.add, [payload.to_dense() for payload in payloads])
    downlink = getattr(collective, "downlink", "dense")
    if downlink == "recode":
        return None
    if downlink == "union" and all(isinstance(payload, (IndexedValues, RowSparse)) for payload in payloads):
        return to_value_dtype(total, _value_dtype(first)).float()
    return total


def _add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A new tensor of the type of `a`: added in fp32, rounded once, saturating; integers wrap."""
    return to_value_dtype(a.to(_wide(a.dtype)) + b.to(_wide(b.dtype)), a.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def _value_dtype(payload: Payload) -> torch.dtype:
    """The value type that a payload's header names."""
    return VALUE_DTYPES[Header.from_bytes(payload.pack()[:HEADER_BYTES].cpu().numpy().tobytes()).dtype]
