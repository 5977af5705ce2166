"""Support overlap: the share of entries that several ranks send. The higher it is, the shorter sums of payloads are."""

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

# Largest number of sampled positions in the model, the same on all ranks: 64 KiB of bits before compression.
MAX_POSITIONS = 1 << 19

# By the ids of a payload's layers: the sampled positions that it transmits, as compressed bits in base64 for JSON.
Samples = dict[str, str]


def support_overlap(payloads: Sequence[Payload]) -> float | None:
    """Return the share of entries that two ranks both send, 2 |A and B| / (|A| + |B|), as the mean over pairs of ranks.

    None if a payload sends every element, or if no payload sends any.
    """
    if any(payload.num_entries == payload.numel for payload in payloads):
        return None
    return _mean_overlap([_support(payload) for payload in payloads])


def sample_index_sets(payloads: Mapping[Key, Payload], model_numel: int) -> Samples:
    """Return a sample of the positions that one rank's payloads transmit, for `sampled_overlap`.

    Args:
        payloads: payloads by their layers' ids; none sends every element.
        model_numel: number of elements of the model, which determines the share of sampled positions.
    """
    share = min(1.0, MAX_POSITIONS / model_numel)
    return {str(key): _text(_sample(_support(payload), share, seed=key[0])) for key, payload in payloads.items()}


def sampled_overlap(of_ranks: Sequence[Samples]) -> float | None:
    """Return the support overlap over the payloads that every rank has made; None if there are none."""
    common = sorted(set.intersection(*(set(samples) for samples in of_ranks)))
    if not common:
        return None
    return _mean_overlap([torch.cat([_bits(samples[key]) for key in common]) for samples in of_ranks])


def _support(payload: Payload) -> torch.Tensor:
    """Return the mask of transmitted elements, bool [numel]."""
    untouched = torch.ones(payload.numel, device=payload.device)
    payload.clear_in_(untouched)
    return untouched == 0


def _sample(support: torch.Tensor, share: float, *, seed: int) -> torch.Tensor:
    """Return this share of the positions, drawn at random, equally on every rank.

    A fixed stride could coincide with the period of groups or rows.
    """
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
    """Return the mean overlap over pairs of masks, bool [numel]; None if every mask is empty."""
    shares = []
    for one, other in itertools.combinations(index_sets, 2):
        entries = int(one.sum()) + int(other.sum())
        if entries:
            shares.append(2 * int((one & other).sum()) / entries)
    return sum(shares) / len(shares) if shares else None
