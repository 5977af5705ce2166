"""Other sums of the ranks' messages than their plain sum: the mean over senders, and norms clipped to their median.

Source: the code of SparseLoCo (Sarfi et al. 2025, arXiv:2508.15706), which averages every element over the ranks that
sent it, and scales down the messages of a tensor that are longer than the median.
"""

import functools
from collections.abc import Sequence

import torch

from collectives.payloads import Dense, Payload
from collectives.payloads.bundle import UnreducedSum
from compressors.local.options import LocalOptions


def combined(total: Payload, numels: Sequence[int], options: LocalOptions) -> Payload:
    """Return what stands for the sum of the ranks' messages, so that a division by the number of ranks follows.

    Args:
        total: the sum over ranks, as `allgather` returns it.
        numels: number of elements of each layer in the messages, in order.
        options: average and clip.
    """
    if options.average == "ranks" and options.clip == "none":
        return total
    terms = list(total.terms) if isinstance(total, UnreducedSum) else [total]
    factors = _factors(terms, numels) if options.clip == "median" else None
    result = torch.zeros(total.numel, device=total.device)
    senders = torch.zeros_like(result) if options.average == "senders" else None
    for rank, term in enumerate(terms):
        dense = term.to_dense()
        if senders is not None:
            senders += dense != 0
        if factors is not None:
            for part, factor in zip(dense.split(list(numels)), factors[rank].tolist(), strict=True):
                part.mul_(factor)
        result += dense
    if senders is not None:
        result.mul_(len(terms)).div_(senders.clamp_(min=1))
    return Dense(result)


def _factors(terms: Sequence[Payload], numels: Sequence[int]) -> torch.Tensor:
    """Return min(1, median over ranks of a layer's norm / norm of the rank), fp64 [ranks, layers].

    With an even number of ranks, the median is the mean of the two in the middle.
    """
    norms = torch.stack([_norms(term.to_dense(), numels) for term in terms])
    median = norms.quantile(0.5, dim=0)
    return torch.where(norms > median, median / norms, torch.ones_like(norms))


def _norms(dense: torch.Tensor, numels: Sequence[int]) -> torch.Tensor:
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
    return torch.stack([norm(part) for part in dense.split(list(numels))])
