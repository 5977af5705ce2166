"""How wire tensors are added: in fp32, rounded once, 16-bit floats saturating; hop by hop or all ranks' at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from collectives.payloads.base import Payload
from collectives.payloads.codec.values import SHORT, lost_in_sum, to_value_dtype
from collectives.transport.base import ReduceOp

Lost = Callable[[torch.Tensor], None]
"""takes what rounding took off sums, fp32, as long as these"""


def combine_(into: torch.Tensor, incoming: torch.Tensor, op: ReduceOp = "sum", lost: Lost | None = None) -> None:
    """`into = into + incoming` or their maximum, element by element; mutates `into`.

    torch adds 16-bit floats in fp32 and rounds once; a sum beyond their range becomes the largest finite number of its
    sign. Integers wrap. NaN stays NaN under both operations. `lost` is called where sums are rounded to 16 bits.
    """
    if op == "max":
        torch.maximum(into, incoming, out=into)
        return
    before = into.clone() if lost is not None and into.dtype in SHORT else None
    into.add_(incoming)
    if into.dtype in SHORT:
        limit = torch.finfo(into.dtype).max
        into.clamp_(-limit, limit)
    if lost is not None and before is not None:
        lost(lost_in_sum(before, incoming, into))


def sum_wires(wires: Sequence[torch.Tensor], op: ReduceOp = "sum", lost: Lost | None = None) -> torch.Tensor:
    """All ranks' wire tensors combined in rank order: 16-bit floats are added in fp32 and rounded once at the end.

    Args:
        wires: one per rank, of one length and dtype.
        op: what to do with two elements.
        lost: called where the sums are rounded to 16 bits.

    Returns:
        A new tensor of the same dtype.
    """
    dtype = wires[0].dtype
    is_short = dtype in SHORT
    total = wires[0].to(torch.float32 if is_short else dtype, copy=True)
    for wire in wires[1:]:
        combine_(total, wire.to(total.dtype), op)
    rounded = to_value_dtype(total, dtype)
    if lost is not None and is_short and op == "sum":
        lost(total.sub_(rounded))
    return rounded


def sum_wires_into_(
    out: torch.Tensor, wires: Sequence[torch.Tensor], op: ReduceOp = "sum", lost: Lost | None = None
) -> None:
    """As `sum_wires`, of two wires or more, written to `out`, which none of the later ones may overlap."""
    if out.dtype in SHORT:
        out.copy_(sum_wires(wires, op, lost))
        return
    (torch.maximum if op == "max" else torch.add)(wires[0], wires[1], out=out)
    for wire in wires[2:]:
        combine_(out, wire, op)


def sum_in_order(terms: Sequence[Payload]) -> torch.Tensor:
    """All ranks' payloads decoded and added in rank order; fp32 [numel], freshly made."""
    total = terms[0].to_dense()
    for term in terms[1:]:
        term.add_to_(total)
    return total
