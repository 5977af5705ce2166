"""Overlap: how much of what one rank sends others send too. The more, the shorter are sums of sparse payloads."""

from __future__ import annotations

import base64
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from collectives.base import Key
from collectives.payloads.base import Payload

# Positions of the model that are looked at, all ranks the same: 64 KiB of bits before compression.
MAX_POSITIONS = 1 << 19

Samples = dict[str, str]
"""ids of a payload's layers -> where it transmits an element, as compressed bits in base64: what JSON can hold"""


def support_overlap(payloads: Sequence[Payload]) -> float | None:
    """Share of entries that two ranks both send: 2 |A and B| / (|A| + |B|), mean over pairs of ranks.

    None where a payload sends every element, or none sends any.
    """
    if any(payload.num_entries == payload.numel for payload in payloads):
        return None
    return _mean_overlap([_support(payload) for payload in payloads])


def sample_index_sets(payloads: Mapping[Key, Payload], model_numel: int) -> Samples:
    """One rank's part of `sampled_overlap`: where its payloads transmit an element.

    Args:
        payloads: by the layers that they belong to, none of which sends every element.
        model_numel: elements of the model, which set the share of positions that is looked at.
    """
    share = min(1.0, MAX_POSITIONS / model_numel)
    return {str(key): _text(_sample(_support(payload), share, seed=key[0])) for key, payload in payloads.items()}


def sampled_overlap(of_ranks: Sequence[Samples]) -> float | None:
    """As `support_overlap`, over all payloads that every rank made; None where there is none."""
    common = sorted(set.intersection(*(set(samples) for samples in of_ranks)))
    if not common:
        return None
    return _mean_overlap([torch.cat([_bits(samples[key]) for key in common]) for samples in of_ranks])


def _support(payload: Payload) -> torch.Tensor:
    """Where the payload transmits an element, bool [numel]."""
    untouched = torch.ones(payload.numel, device=payload.device)
    payload.clear_in_(untouched)
    return untouched == 0


def _sample(support: torch.Tensor, share: float, *, seed: int) -> torch.Tensor:
    """This share of the positions, drawn alike on every rank: groups and rows have periods that a stride could hit."""
    if share == 1:
        return support.cpu()
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(support.numel(), (math.ceil(share * support.numel()),), generator=generator)
    return support[positions.to(support.device)].cpu()


def _text(bits: torch.Tensor) -> str:
    return base64.b64encode(zlib.compress(np.packbits(bits.numpy()).tobytes())).decode()


def _bits(text: str) -> torch.Tensor:
    packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
    return torch.from_numpy(np.unpackbits(packed)).bool()


def _mean_overlap(index_sets: Sequence[torch.Tensor]) -> float | None:
    """Mean over pairs of ranks, of index sets bool [numel] of which one pair at least marks something."""
    shares = []
    for one, other in itertools.combinations(index_sets, 2):
        entries = int(one.sum()) + int(other.sum())
        if entries:
            shares.append(2 * int((one & other).sum()) / entries)
    return sum(shares) / len(shares) if shares else None
