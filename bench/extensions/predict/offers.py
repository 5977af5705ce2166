"""What a calibrated message is to a collective: how it can be cut, and how long its pieces and their sums are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from bench.extensions.predict.calibration import FP32_BYTES, BucketParts, LeafSize, MessageProfile
from collectives.payloads.base import HEADER_BYTES
from collectives.schedule.layout import Layout, Leaf
from collectives.schedule.waves import Ints, Lengths


def layout_of(offer: MessageProfile, bucket: BucketParts) -> Layout:
    """What is the same of all ranks' messages."""
    numel_of = dict(zip(bucket.layers, bucket.numels, strict=True))
    return Layout(tuple(map(_leaf, offer.leaves)), offer.layers, tuple(numel_of[layer] for layer in offer.layers))


def lengths_of(offer: MessageProfile) -> Lengths:
    """Bytes of its pieces: each payload's spread evenly over its elements, growing with the ranks whose it is.

    Growth goes on beyond what was measured as it went at last, until the dense form in fp32 is shorter.
    """
    offsets = np.cumsum([0, *(leaf.numel for leaf in offer.leaves)])
    bodies = np.cumsum([0.0, *(leaf.nbytes - HEADER_BYTES for leaf in offer.leaves)])
    filled = np.flatnonzero(np.diff(offsets))
    firsts, ends = offsets[:-1][filled], offsets[1:][filled]

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        payloads = np.maximum(1, np.searchsorted(firsts, stop) - np.searchsorted(ends, start, side="right"))
        one = np.interp(stop, offsets, bodies) - np.interp(start, offsets, bodies)
        dense = np.maximum(one, FP32_BYTES * (stop - start))
        nbytes = HEADER_BYTES * payloads + np.minimum(one * grown(offer, terms), dense)
        return payloads, np.ceil(nbytes - 1e-6).astype(np.int64)

    return Lengths(packed)


def grown(offer: MessageProfile, terms: Ints) -> npt.NDArray[np.float64]:
    """Bytes of the union of so many ranks' messages / bytes of one."""
    ranks, factors = np.log(list(offer.growth)).T
    logs = np.interp(np.log(terms), ranks, factors)
    if len(ranks) > 1:
        slope = (factors[-1] - factors[-2]) / (ranks[-1] - ranks[-2])
        logs = logs + slope * np.maximum(0.0, np.log(terms) - ranks[-1])
    factor: npt.NDArray[np.float64] = np.exp(logs)
    return factor


def _leaf(size: LeafSize) -> Leaf:
    wire = None
    if size.wire_numel is not None and size.wire_dtype is not None:
        wire = size.wire_numel, getattr(torch, size.wire_dtype)
    return Leaf(size.numel, size.alignment, size.addable, wire, size.splits_blocks)
