"""How one wire tensor is added to another at a hop: in fp32, rounded once, 16-bit floats saturating."""

from __future__ import annotations

import torch

from collectives.transport import ReduceOp


def combine_(into: torch.Tensor, incoming: torch.Tensor, op: ReduceOp = "sum") -> None:
    """`into = into + incoming` or their maximum, element by element; mutates `into`.

    torch adds 16-bit floats in fp32 and rounds once; a sum beyond their range becomes the largest finite number of its
    sign. Integers wrap. NaN stays NaN under both operations.
    """
    if op == "max":
        torch.maximum(into, incoming, out=into)
        return
    into.add_(incoming)
    if into.dtype in (torch.float16, torch.bfloat16):
        limit = torch.finfo(into.dtype).max
        into.clamp_(-limit, limit)
