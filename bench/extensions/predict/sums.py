"""Sums: the messages that ranks send to sum one message of a compressor, and the costs of each of them.

They do not depend on links or times. So they are kept, because a prediction simulates several steps, and rates of links
are compared one after another.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bench.extensions.predict.calibration import FP32_BYTES, BucketParts, LinearCost, MessageProfile
from bench.extensions.predict.flows import NOTHING
from collectives.base import Collective
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.bundle import padded
from collectives.schedule.rounds import Layout, Leaf
from collectives.schedule.waves import Ints, Lengths, Wave, waves_of

# Most ranks for which messages are kept; those of more ranks would take too much memory.
KEPT_UP_TO = 64
MOST_KEPT = 256


class Sum(NamedTuple):
    """A sum over ranks.

    Attributes:
        waves: the messages of all ranks.
        unpack: cost of unpacking each received message.
        merge: cost of adding a received message to the receiver's own values.
    """

    waves: Iterable[Wave]
    unpack: LinearCost
    merge: LinearCost


@dataclasses.dataclass(frozen=True)
class _Key:
    """Everything on which the messages depend; collectives of one class with equal options are equal."""

    kind: type[Collective]
    options: str
    num_ranks: int
    bucket: BucketParts
    offer: MessageProfile
    collective: Collective = dataclasses.field(compare=False)


def sums_of(collective: Collective, num_ranks: int, bucket: BucketParts, offer: MessageProfile) -> Iterable[Sum]:
    """Return the sums of one message over ranks; if the message has several dtypes, each is summed separately.

    Args:
        collective: the collective; it must describe its rounds of messages.
        num_ranks: number of ranks.
        bucket: the bucket of gradients to which the message belongs.
        offer: the message.
    """
    if num_ranks > KEPT_UP_TO:
        return _sums(collective, num_ranks, bucket, offer)
    return _kept(_Key(type(collective), repr(collective), num_ranks, bucket, offer, collective))


@functools.lru_cache(maxsize=MOST_KEPT)
def _kept(key: _Key) -> list[Sum]:
    found = _sums(key.collective, key.num_ranks, key.bucket, key.offer)
    return [each._replace(waves=list(each.waves)) for each in found]


def _sums(collective: Collective, num_ranks: int, bucket: BucketParts, offer: MessageProfile) -> Iterator[Sum]:
    together = [tuple(range(len(offer.leaves)))]
    for group in layout_of(offer, bucket).by_type() if collective.carries_wires else together:
        part = dataclasses.replace(offer, leaves=tuple(offer.leaves[index] for index in group))
        waves = waves_of(collective, num_ranks, layout_of(part, bucket), lengths_of(part))
        assert waves is not None  # `check_predictable` refuses collectives without rounds
        merge = part.merge
        if collective.decodes and any(leaf.wire_numel is None for leaf in part.leaves):
            merge = LinearCost(per_byte_s=part.decode_s / max(1, part.nbytes))  # received parts are decoded
        yield Sum(waves, NOTHING if is_bare(part, collective) else part.unpack, merge)


def is_bare(offer: MessageProfile, collective: Collective) -> bool:
    """Return True if the collective sends the message's tensors as they are, not packed into bytes."""
    return collective.carries_wires and all(leaf.wire_numel is not None for leaf in offer.leaves)


def layout_of(offer: MessageProfile, bucket: BucketParts) -> Layout:
    """Return the layout of a message with gradients of a bucket: the sizes of the message's payloads and layers.

    Args:
        offer: the message.
        bucket: the bucket of gradients.
    """
    numel_of = dict(zip(bucket.layers, bucket.numels, strict=True))
    wires = [
        None
        if size.wire_numel is None or size.wire_dtype is None
        else (size.wire_numel, getattr(torch, size.wire_dtype))
        for size in offer.leaves
    ]
    leaves = [
        Leaf(size.numel, size.alignment, size.addable, wire, size.splits_blocks)
        for size, wire in zip(offer.leaves, wires, strict=True)
    ]
    return Layout(tuple(leaves), offer.layers, tuple(numel_of[layer] for layer in offer.layers))


def lengths_of(offer: MessageProfile) -> Lengths:
    """Return the rule that computes the bytes of any part of the message `offer`, in the form that collectives send.

    The bytes of a payload are assumed to be spread evenly over its elements, and grow with the number of ranks whose
    payloads are merged. Beyond the measured numbers of ranks, they grow at the last measured rate, but at most to the
    length of an uncompressed tensor in fp32. Payloads that travel together are padded, as in `Bundle`.
    """
    offsets = np.cumsum([0, *(leaf.numel for leaf in offer.leaves)])
    bodies = np.cumsum([0.0, *(leaf.nbytes - HEADER_BYTES for leaf in offer.leaves)])
    padding = np.cumsum([0.0, *(padded(leaf.nbytes) - leaf.nbytes for leaf in offer.leaves)])
    filled = np.flatnonzero(np.diff(offsets))
    firsts, ends = offsets[:-1][filled], offsets[1:][filled]
    ranks, factors = np.log(list(offer.growth)).T
    slope = (factors[-1] - factors[-2]) / (ranks[-1] - ranks[-2]) if len(ranks) > 1 else 0.0

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        payloads = np.maximum(1, np.searchsorted(firsts, stop) - np.searchsorted(ends, start, side="right"))
        one = np.interp(stop, offsets, bodies) - np.interp(start, offsets, bodies)
        one += (payloads > 1) * (np.interp(stop, offsets, padding) - np.interp(start, offsets, padding))
        dense = np.maximum(one, FP32_BYTES * (stop - start))
        is_whole = (terms == 1) & _are_among(offsets, start) & _are_among(offsets, stop)  # payloads that are not cut
        growth = np.exp(np.interp(np.log(terms), ranks, factors) + slope * np.maximum(0.0, np.log(terms) - ranks[-1]))
        nbytes = HEADER_BYTES * payloads + np.minimum(np.where(is_whole, one, one * growth), dense)
        return payloads, np.ceil(nbytes - 1e-6).astype(np.int64)

    return Lengths(packed)


def _are_among(borders: Ints, positions: Ints) -> npt.NDArray[np.bool_]:
    """Return for each position whether it is one of the ascending borders; faster than `numpy.isin`."""
    found: npt.NDArray[np.bool_] = borders[np.searchsorted(borders, positions).clip(max=len(borders) - 1)] == positions
    return found
