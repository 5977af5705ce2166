"""Prices: what a pair would cost on the link as it is, from gradients as they are.

A model of one step's exchange that says which pairs are worth trying and which of two a layer is cheaper with; what a
step really takes is measured. Each wave of messages (`waves_of`) takes a latency, and the bytes of the rank
that sends most, at the rate of the link.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import NamedTuple

import numpy as np
import torch

from collectives.base import BoundCollective, Collective
from collectives.payloads.base import HEADER_BYTES
from collectives.payloads.dense import Dense
from collectives.schedule.layout import Layout, Leaf
from collectives.schedule.waves import Ints, Lengths, waves_of
from collectives.transport.base import Transport
from compressors.base import FP32_BYTES, PerLayer
from compressors.choice import Pair
from compressors.layer import Layer, Memory, Step

_SHORT, _LONGEST = 64, 1 << 18
_LONG_ENOUGH_S = 0.01
_REPEATS = 3


class Seen(NamedTuple):
    """What a compressor made of a layer's gradient, the worst of all ranks.

    Attributes:
        seconds: of encoding.
        nbytes: of the packed payload.
        error: |x - C(x)| / |x|; 1 where there is no gradient, of which nobody knows what it would lose.
    """

    seconds: float
    nbytes: float
    error: float


def look(compressor: PerLayer, layer: Layer, x: torch.Tensor, step: Step) -> Seen:
    """Encode a gradient, fp32 [layer.numel], twice, and keep nothing of it."""
    if not layer.numel or compressor.leaves_dense(layer):
        return Seen(seconds=0.0, nbytes=FP32_BYTES * layer.numel, error=0.0)
    seconds = []
    for _ in range(2):
        trial = dataclasses.replace(step, memory=Memory())
        started = time.perf_counter()
        payload = compressor.encode(x, layer, trial)
        if x.is_cuda:
            torch.cuda.synchronize(x.device)
        seconds.append(time.perf_counter() - started)
    nbytes, left, norm = payload.nbytes, x.clone(), float(x.norm())
    compressor.subtract_(left, payload, layer, trial)
    return Seen(seconds=min(seconds), nbytes=nbytes, error=float(left.norm()) / norm if norm else 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkCost:
    """What messages take: the slowest rank's.

    Attributes:
        wave_s: a wave of messages, however short.
        per_byte_s: one more byte that a rank sends.
    """

    wave_s: float
    per_byte_s: float


def measure_link(collective: BoundCollective, transport: Transport) -> LinkCost:
    """Time sums of a short tensor and of a longer one; every rank must call. Counted as control."""
    with transport.counted_as("control"):
        short_s = _sum_s(collective, transport, _SHORT)
        numel, seconds = _SHORT * 64, 0.0
        while numel <= _LONGEST:
            seconds = _sum_s(collective, transport, numel)
            if seconds - short_s > _LONG_ENOUGH_S:
                break
            numel *= 4
    numel = min(numel, _LONGEST)
    waves, nbytes = _waves(collective.options, transport.world_size, Layout.dense(numel), None)
    _, few = _waves(collective.options, transport.world_size, Layout.dense(_SHORT), None)
    return LinkCost(wave_s=short_s / max(1, waves), per_byte_s=max(0.0, seconds - short_s) / max(1.0, nbytes - few))


def exchange_s(pair: Pair, nbytes: float, numel: int, link: LinkCost, world_size: int) -> float:
    """Seconds in which messages travel if what is summed has so many packed bytes and stands for so many elements."""
    if not numel or world_size == 1:
        return 0.0
    waves, sent = _messages(pair, nbytes, numel, world_size)
    return waves * link.wave_s + sent * link.per_byte_s


@functools.lru_cache(maxsize=4096)
def _messages(pair: Pair, nbytes: float, numel: int, world_size: int) -> tuple[int, float]:
    """As `_waves` has it; a choice asks it of every layer, and again whenever a link is held to have changed."""
    compressor, collective = pair.built()
    if all(kind.elementwise for kind in compressor.emits) and collective.carries_wires:
        return _waves(collective, world_size, Layout.dense(round(nbytes), itemsize=1), None)
    return _waves(collective, world_size, Layout((Leaf(numel),)), _growing(nbytes, numel))


def _sum_s(collective: BoundCollective, transport: Transport, numel: int) -> float:
    """Seconds of the fastest of a few sums, on the slowest rank; of one, if that takes long enough."""
    fastest = math.inf
    transport.barrier()
    for _ in range(_REPEATS):
        started = time.perf_counter()
        collective.sum(Dense(torch.zeros(numel, device=transport.device)), ())
        (seconds,) = transport.all_reduce_scalars([time.perf_counter() - started], "max")
        fastest = min(fastest, seconds)
        if fastest > _LONG_ENOUGH_S:
            break
    return fastest


def _waves(collective: Collective, world_size: int, layout: Layout, lengths: Lengths | None) -> tuple[int, float]:
    """(waves of messages one after the other, bytes that the busiest rank sends, summed over waves)."""
    lengths = lengths or _growing(FP32_BYTES * layout.numel, layout.numel).bare(layout.itemsize)
    count, total = 0, 0.0
    for wave in waves_of(collective, world_size, layout, lengths) or ():
        sources, _, nbytes = wave.messages()
        count += 1
        total += float(np.bincount(sources, weights=nbytes).max(initial=0.0))
    return count, total


def _growing(nbytes: float, numel: int) -> Lengths:
    """Pieces of a payload whose entries differ from rank to rank, so that sums grow until they are dense."""

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        body = np.minimum(max(0.0, nbytes - HEADER_BYTES) / numel * terms, FP32_BYTES) * (stop - start)
        return np.ones_like(start), (HEADER_BYTES + np.ceil(body)).astype(np.int64)

    return Lengths(packed)
