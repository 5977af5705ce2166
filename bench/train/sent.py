"""Compute statistics of what was sent: per layer for `layers.csv`, and the share of entries that two ranks share."""

import base64
import dataclasses
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from collectives.base import Key
from collectives.payloads.base import Payload
from compressors.ddp.report import Decision, EncodedLayer
from compressors.layer import Layer


@dataclasses.dataclass(kw_only=True)
class RunningStats:
    """Statistics of the numbers added so far.

    Attributes:
        count: how many numbers were added.
        total: sum of the numbers.
        least, largest: the smallest and the largest number; None if no number was added.
    """

    count: int = 0
    total: float = 0.0
    least: float | None = None
    largest: float | None = None

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        self.total += value
        self.least = value if self.least is None else min(self.least, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        """Return the mean of the numbers; None if no number was added."""
        return self.total / self.count if self.count else None


@dataclasses.dataclass(kw_only=True)
class LayerCounts:
    """Statistics of one layer over the steps since the previous row.

    Attributes:
        payload: kinds of payload of the last step, joined by +.
        nbytes: encoded bytes of all steps.
        seconds: encoding time of all steps.
        density: share of the layer's elements that each message sends.
        wanted: share of elements that the compressor was configured to send.
        of_wanted: share sent divided by share configured.
    """

    payload: str = ""
    nbytes: float = 0.0
    seconds: float = 0.0
    density: RunningStats = dataclasses.field(default_factory=RunningStats)
    wanted: RunningStats = dataclasses.field(default_factory=RunningStats)
    of_wanted: RunningStats = dataclasses.field(default_factory=RunningStats)


def count_layers(counts: dict[int, LayerCounts], encoded: Sequence[EncodedLayer]) -> None:
    """Add the layers that one step has encoded to `counts`, which holds the statistics by layer id."""
    kinds: dict[int, dict[str, None]] = {}
    for part in encoded:
        count = counts.setdefault(part.layer.id, LayerCounts())
        kinds.setdefault(part.layer.id, {})[part.payload] = None
        count.payload = "+".join(kinds[part.layer.id])
        count.nbytes += part.nbytes
        count.seconds += part.seconds
        density = part.num_entries / max(1, part.layer.numel)
        count.density.add(density)
        if part.density_wanted is not None:
            count.wanted.add(part.density_wanted)
            count.of_wanted.add(density / part.density_wanted)


def layer_rows(
    layers: Sequence[Layer],
    counts: Mapping[int, LayerCounts],
    num_steps: int,
    residual_norms: Mapping[int, float],
    decision: Decision | None,
) -> list[dict[str, Any]]:
    """Return one row of `layers.csv` per layer, without the columns that identify the evaluation.

    Args:
        layers: the model's trainable parameters.
        counts: statistics over `num_steps` steps, by layer id.
        num_steps: number of this rank's steps since the previous row.
        residual_norms: L2 norm of each layer's residual, by layer id.
        decision: compressor and collective chosen for each layer; None if the exchange does not choose them.
    """
    rows = []
    for layer in layers:
        count = counts.get(layer.id, LayerCounts())
        row = {
            "layer": layer.name,
            "kind": layer.kind,
            "numel": layer.numel,
            "payload": count.payload,
            "payload_bytes": count.nbytes / max(1, num_steps),
            "density_min": count.density.least,
            "density_mean": count.density.mean,
            "density_max": count.density.largest,
            "density_wanted": count.wanted.mean,
            "density_of_wanted_min": count.of_wanted.least,
            "density_of_wanted_max": count.of_wanted.largest,
            "residual_norm": residual_norms.get(layer.id),
            "encode_s": count.seconds / max(1, num_steps),
        }
        rows.append(row | (decision.layer_columns(layer) if decision is not None else {}))
    return rows


# Largest number of sampled positions in the model, the same on all ranks: 64 KiB of bits before compression.
MAX_POSITIONS = 1 << 19

# By the ids of a payload's layers: the sampled positions that it transmits, as compressed bits in base64 for JSON.
IndexSample = dict[str, str]


def support_overlap(payloads: Sequence[Payload]) -> float | None:
    """Return the share of entries that two ranks both send, 2 |A and B| / (|A| + |B|), as the mean over pairs of ranks.

    The result is None if a payload sends every element, or if no payload sends any.

    Args:
        payloads: one payload per rank, all of the same layers.
    """
    if any(payload.num_entries == payload.numel for payload in payloads):
        return None
    return _mean_overlap([_support(payload) for payload in payloads])


def sample_index_sets(payloads: Mapping[Key, Payload], model_numel: int) -> IndexSample:
    """Sample positions of each payload at random, and return which of them are sent, for `sampled_overlap`.

    The sampled positions are the same on every rank. They are random, because positions at a fixed stride could
    coincide with the period of groups or rows.

    Args:
        payloads: one rank's payloads, by the ids of their layers; payloads that send every element are left out.
        model_numel: number of elements of the model, which determines the share of positions that is sampled.
    """
    share = min(1.0, MAX_POSITIONS / model_numel)
    sample = {}
    for key, payload in payloads.items():
        support = _support(payload)
        if share < 1:
            generator = torch.Generator().manual_seed(key[0])
            positions = torch.randint(support.numel(), (math.ceil(share * support.numel()),), generator=generator)
            support = support[positions.to(support.device)]
        packed = np.packbits(support.cpu().numpy()).tobytes()
        sample[str(key)] = base64.b64encode(zlib.compress(packed)).decode()
    return sample


def sampled_overlap(of_ranks: Sequence[IndexSample]) -> float | None:
    """Return the mean over pairs of ranks of the share of entries that both send, as `support_overlap` defines it.

    Only payloads that every rank has made are compared; the result is None if there are none.

    Args:
        of_ranks: for each rank, the result of `sample_index_sets`.
    """
    common = sorted(set.intersection(*(set(samples) for samples in of_ranks)))
    if not common:
        return None

    def bits(text: str) -> torch.Tensor:
        packed = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(packed)).bool()

    return _mean_overlap([torch.cat([bits(samples[key]) for key in common]) for samples in of_ranks])


def _support(payload: Payload) -> torch.Tensor:
    """Return the mask of the elements that a payload transmits, bool [numel]."""
    untouched = torch.ones(payload.numel, device=payload.device)
    payload.clear_in_(untouched)
    return untouched == 0


def _mean_overlap(index_sets: Sequence[torch.Tensor]) -> float | None:
    """Return the mean overlap over pairs of masks, bool [numel]; None if every mask is empty."""
    shares = [
        2 * int((one & other).sum()) / entries
        for one, other in itertools.combinations(index_sets, 2)
        if (entries := int(one.sum()) + int(other.sum()))
    ]
    return sum(shares) / len(shares) if shares else None
