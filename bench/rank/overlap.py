"""Estimate how many of the positions that one rank sends are also sent by another rank, from a sample of positions."""

import base64
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from collectives.base import Key
from collectives.payloads.base import Payload
from collectives.payloads.bundle import Bundle

# Largest number of sampled positions in the model, the same on all ranks: 64 KiB of bits before compression.
MAX_POSITIONS = 1 << 19


def sample_index_sets(payloads: Mapping[Key, Payload], model_numel: int) -> dict[str, str]:
    """Sample positions of each payload's layers at random, and return which of these positions the payload sends.

    The result is a text per payload, by the ids of the payload's layers: one bit per position, compressed, in base64.
    The sampled positions are the same on every rank. They are random, because positions at a fixed stride could
    coincide with the period of groups or rows.

    Args:
        payloads: one rank's payloads, by the ids of their layers; payloads that send every element are left out.
        model_numel: number of elements of the model, which determines the share of positions that is sampled.
    """
    share = min(1.0, MAX_POSITIONS / model_numel)
    sample = {}
    for key, payload in itertools.chain.from_iterable(itertools.starmap(_by_layer, payloads.items())):
        is_sent = support(payload)
        if share < 1:
            generator = torch.Generator().manual_seed(key[0])
            positions = torch.randint(is_sent.numel(), (math.ceil(share * is_sent.numel()),), generator=generator)
            is_sent = is_sent[positions.to(is_sent.device)]
        packed = np.packbits(is_sent.cpu().numpy()).tobytes()
        sample[str(key)] = base64.b64encode(zlib.compress(packed)).decode()
    return sample


def _by_layer(key: Key, payload: Payload) -> list[tuple[Key, Payload]]:
    # a bundle holds a payload for each layer
    if not isinstance(payload, Bundle):
        return [(key, payload)]
    members = zip(key, payload.payloads, strict=True)
    return [((layer_id,), member) for layer_id, member in members if member.num_entries < member.numel]


def sampled_overlap(of_ranks: Sequence[dict[str, str]]) -> float | None:
    """Return the share of sampled positions that two ranks both send, from 0 to 1, as the mean over pairs of ranks.

    The share of two ranks is 2 |A and B| / (|A| + |B|), where A and B are the sets of sampled positions that they send.
    Only payloads that every rank has made are compared; the result is None if there are no such payloads.

    Args:
        of_ranks: for each rank, the result of `sample_index_sets`.
    """
    common = sorted(set.intersection(*(set(samples) for samples in of_ranks)))
    if not common:
        return None
    packed = (b"".join(zlib.decompress(base64.b64decode(samples[key])) for key in common) for samples in of_ranks)
    bits = (np.unpackbits(np.frombuffer(part, dtype=np.uint8)) for part in packed)
    return mean_overlap([torch.from_numpy(each).bool() for each in bits])


def support(payload: Payload) -> torch.Tensor:
    """Return the mask of the elements that a payload transmits, bool [numel]."""
    untouched = torch.ones(payload.numel, device=payload.device)
    payload.clear_in_(untouched)
    return untouched == 0


def mean_overlap(index_sets: Sequence[torch.Tensor]) -> float | None:
    """Return the overlap of two masks, bool [numel], as the mean over all pairs of masks; None if all are empty."""
    shares = [
        2 * int((one & other).sum()) / entries
        for one, other in itertools.combinations(index_sets, 2)
        if (entries := int(one.sum()) + int(other.sum()))
    ]
    return sum(shares) / len(shares) if shares else None
