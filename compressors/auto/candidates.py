"""Candidates: the choices of compressor-collective pairs for the layers that `auto` can try, and their estimated cost.

A choice assigns a pair to every layer. There is one choice for each pair, in which most layers use that pair. A trial
is a few training steps with one choice, whose times are measured. A model of the exchange in one step has two uses: it
selects the pairs that are worth a trial, and the cheaper of two pairs for a layer. In the model, each wave of messages
(messages that depend only on earlier waves, see `waves_of`) takes a latency, plus the time in which the link transfers
the bytes of the rank that sends most.
"""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np
import torch

from collectives.base import BoundCollective, Collective
from collectives.payloads.base import HEADER_BYTES, Dense
from collectives.schedule.rounds import Layout, Leaf
from collectives.schedule.waves import Ints, Lengths, waves_of
from collectives.transport.base import Transport
from compressors.auto.choice import Choice, Pair, Part, dense_pair, pairs_on
from compressors.base import FP32_BYTES, PerLayer
from compressors.layer import Layer, Memory, Step
from gradwire.exchange.report import Bucket

# Numbers of elements of the tensors whose sums are timed: a short one, and longer ones until a sum takes long enough.
_SHORT, _LONGER = 64, (1 << 12, 1 << 14, 1 << 16, 1 << 18)
_LONG_ENOUGH_S = 0.01
_REPEATS = 3


class Seen(NamedTuple):
    """The cost and the error of encoding a layer's gradient x; after `Candidates.agree`, the maxima over all ranks.

    Attributes:
        seconds: time of encoding.
        nbytes: bytes of the packed payload.
        error: |x - C(x)| / |x|, where C(x) is the decoded payload; 1 if the gradient is zero, so its error is unknown.
    """

    seconds: float
    nbytes: float
    error: float


def look(compressor: PerLayer, layer: Layer, x: torch.Tensor, step: Step) -> Seen:
    """Encode a gradient x, fp32 [layer.numel], and return the time, the bytes and the error of encoding.

    The gradient is encoded twice, and the shorter time counts. The compressor's state is not changed.
    """
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
    payload.subtract_from_(left)
    return Seen(seconds=min(seconds), nbytes=nbytes, error=float(left.norm()) / norm if norm else 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageCost:
    """The speed of the network link, as seconds that the messages of a sum over ranks take on the slowest rank.

    Attributes:
        wave_s: seconds per wave (messages that ranks send at the same time), even if the messages are empty.
        per_byte_s: seconds per byte that a rank sends.
    """

    wave_s: float
    per_byte_s: float


def measure_link(collective: BoundCollective, transport: Transport) -> MessageCost:
    """Return the speed of the network link, from the times of sums over ranks of a short and of a longer tensor.

    Every rank must call this function. The traffic counts under the purpose "control".
    """
    with transport.counted_as("control"):
        short_s = _sum_s(collective, transport, _SHORT)
        for numel in _LONGER:
            seconds = _sum_s(collective, transport, numel)
            if seconds - short_s > _LONG_ENOUGH_S:
                break
    waves, nbytes = _waves(collective.options, transport.world_size, Layout.dense(numel), None)
    _, few = _waves(collective.options, transport.world_size, Layout.dense(_SHORT), None)
    return MessageCost(wave_s=short_s / max(1, waves), per_byte_s=max(0.0, seconds - short_s) / max(1.0, nbytes - few))


def exchange_s(pair: Pair, nbytes: float, numel: int, link: MessageCost, world_size: int) -> float:
    """Return the estimated seconds that the messages of one sum over ranks take.

    Args:
        pair: the compressor that makes the payloads, and the collective that sums them.
        nbytes: bytes of each rank's payload.
        numel: number of elements that a payload stands for.
        link: the speed of the network link.
        world_size: number of ranks.
    """
    if not numel or world_size == 1:
        return 0.0
    waves, sent = _messages(pair, nbytes, numel, world_size)
    return waves * link.wave_s + sent * link.per_byte_s


@functools.lru_cache(maxsize=4096)
def _messages(pair: Pair, nbytes: float, numel: int, world_size: int) -> tuple[int, float]:
    """Return the number of waves (steps) of messages in a sum, and the total bytes of each wave's busiest sender."""
    compressor, collective = pair.built()
    if all(kind.elementwise for kind in compressor.traits.emits) and collective.carries_wires:
        return _waves(collective, world_size, Layout.dense(round(nbytes), itemsize=1), None)
    return _waves(collective, world_size, Layout((Leaf(numel),)), _growing(nbytes, numel))


def _sum_s(collective: BoundCollective, transport: Transport, numel: int) -> float:
    """Time some sums of `numel` elements over ranks, and return the seconds of the fastest sum.

    The time of a sum is that of the slowest rank. If a sum takes long, it is not repeated.
    """
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
    """Return the number of waves (steps) of messages in a sum, and the total bytes of each wave's busiest sender.

    The busiest sender of a wave is the rank that sends most bytes in it.

    Args:
        collective: the collective that sums.
        world_size: number of ranks.
        layout: elements of the payload.
        lengths: computes the bytes of partial sums; None if the messages are parts of a tensor, without headers.
    """
    lengths = lengths or dataclasses.replace(
        _growing(FP32_BYTES * layout.numel, layout.numel), itemsize=layout.itemsize
    )
    count, total = 0, 0.0
    for wave in waves_of(collective, world_size, layout, lengths) or ():
        sources, _, nbytes = wave.messages()
        count += 1
        total += float(np.bincount(sources, weights=nbytes).max(initial=0.0))
    return count, total


def _growing(nbytes: float, numel: int) -> Lengths:
    """Return a rule for the bytes of partial sums of payloads that hold different elements on different ranks.

    A sum of n payloads takes n times the bytes of one payload, but at most the bytes of a dense fp32 tensor.

    Args:
        nbytes: bytes of each rank's payload.
        numel: number of elements that a payload stands for.
    """

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        body = np.minimum(max(0.0, nbytes - HEADER_BYTES) / numel * terms, FP32_BYTES) * (stop - start)
        return np.ones_like(start), (HEADER_BYTES + np.ceil(body)).astype(np.int64)

    return Lengths(packed)


SMALL = 1024  # layers of at most this many elements use the pair of most layers, because their error and cost are small
TRIED = "tried"  # during a trial, the reason for the pair of a layer that uses the same pair as most layers


class Candidates:
    """The choices (assignments of compressor-collective pairs to layers) that `auto` can try.

    They follow from the costs and errors of encoding real gradients with the compressor of every pair. `look_at` and
    `agree` collect the costs and errors, and must be called first.

    Args:
        collective: the run's collective.
        layers: every trainable parameter.
        world_size: number of ranks.
        error: the largest allowed `Seen.error` of a layer of more than `SMALL` elements.

    Attributes:
        pairs: the compressor-collective pairs, from dense to sparse.
        dense: the pair of `bf16`, which every layer may use because its error is small.
        layers: the layers that have elements.
        link: the latest measured speed of the network link; the caller sets it.
    """

    def __init__(self, collective: Collective, layers: Sequence[Layer], world_size: int, error: float) -> None:
        self.pairs = pairs_on(collective)
        self.dense = dense_pair(collective)
        self.layers = [layer for layer in layers if layer.numel]
        self.link = MessageCost(wave_s=0.0, per_byte_s=0.0)
        self._largest_error = error
        self._world_size = world_size
        self._compressors = {pair: cast(PerLayer, pair.built()[0]) for pair in self.pairs}
        self._seen: dict[Pair, dict[int, Seen]] = {}
        self._buckets: list[list[Layer]] = []
        self._looked_at: Step | None = None

    def have_changed(self, step: Step | None) -> bool:
        """Return True if a compressor would now send another share of a layer's entries than in the last `look_at`.

        Shares change during warm-up, in which sparse compressors start with more entries.

        Args:
            step: the current step; None before the first step.
        """
        if step is None or self._looked_at is None:
            return False
        return any(
            compressor.density_for(layer, step) != compressor.density_for(layer, self._looked_at)
            for compressor in self._compressors.values()
            for layer in self.layers[:1]
        )

    def forget_gradients(self) -> None:
        """Discard the results of `look_at`; call this before all buckets of another step are encoded."""
        self._seen = {pair: {} for pair in self.pairs}
        self._buckets = []

    def look_at(self, bucket: Bucket) -> None:
        """Encode a bucket's gradients with the compressor of every pair, and store costs and errors; send nothing."""
        self._buckets.append(bucket.layers)
        self._looked_at = bucket.step
        for layer, gradient in zip(bucket.layers, bucket.gradients, strict=True):
            x = gradient.float()
            for pair, compressor in self._compressors.items():
                self._seen[pair][layer.id] = look(compressor, layer, x, bucket.step)

    def agree(self, transport: Transport) -> None:
        """Replace this rank's encoding costs and errors with the maxima over all ranks.

        Every rank must call this method.
        """
        unseen = Seen(seconds=0.0, nbytes=0, error=0.0)
        keys = [(pair, layer.id) for pair in self.pairs for layer in self.layers]
        own = [value for pair, layer_id in keys for value in self._seen[pair].get(layer_id, unseen)]
        worst = iter(transport.all_reduce_scalars(own, "max"))
        for (pair, layer_id), values in zip(keys, zip(worst, worst, worst, strict=True), strict=True):
            self._seen[pair][layer_id] = Seen(*values)

    def choices(self) -> dict[Pair, Choice]:
        """Return the choices that can be tried; the key of a choice is the pair that most of its layers use.

        If several choices assign the same pair to every layer, only the first of them is returned.
        """
        choices: dict[Pair, Choice] = {}
        for pair in self.pairs:
            choice = self.choice(pair)
            if all(choice.pair_of != other.pair_of for other in choices.values()):
                choices[pair] = choice
        return choices

    def choice(self, pair: Pair) -> Choice:
        """Return the choice in which all layers use `pair`, except those whose error or cost would be too high.

        A layer with a high error gets the next denser pair whose error is allowed, or `self.dense` (the pair of `bf16`)
        if there is none. A layer that costs less with `self.dense` gets `self.dense`.
        """
        layers_of: dict[tuple[Pair, str], list[int]] = {}
        dearer = self._dearer_than_dense(pair)
        for layer in self.layers:
            error = self._seen[pair][layer.id].error
            chosen, why = pair, TRIED
            if layer.id in dearer:
                chosen, why = self.dense, f"dense is cheaper than {pair.compressor} here"
            elif layer.numel > SMALL and error > self._largest_error:
                denser = reversed(self.pairs[: self.pairs.index(pair)])
                good = (other for other in denser if self._seen[other][layer.id].error <= self._largest_error)
                chosen, why = next(good, self.dense), f"{pair.compressor} would lose {error:.1%} of the gradient's norm"
            layers_of.setdefault((chosen, why), []).append(layer.id)
        return Choice(
            step=0, parts=tuple(Part(pair=to, layers=tuple(ids), why=why) for (to, why), ids in layers_of.items())
        )

    def cost_s(self, choice: Choice, link: MessageCost | None = None) -> float:
        """Return the estimated seconds of encoding and of messages in a step, without any overlap of the two.

        Args:
            choice: the compressor-collective pair of every layer.
            link: the speed of the network link; None for the latest measured speed.
        """
        total, link = 0.0, link or self.link
        for part, bucket in itertools.product(choice.parts, self._buckets):
            layers = [layer for layer in bucket if layer.id in part.layers]
            seen = [self._seen[part.pair][layer.id] for layer in layers]
            numel, nbytes = sum(layer.numel for layer in layers), sum(each.nbytes for each in seen)
            total += sum(each.seconds for each in seen)
            total += exchange_s(part.pair, nbytes, numel, link, self._world_size)
        return total

    def cost_ratio(self, link: MessageCost, pair: Pair, negligible_s: float) -> float:
        """Return how many times as much a step costs at one speed of the network link as at another; at least 1.

        The two speeds are `link` and the latest measured speed; the larger cost is divided by the smaller cost. This
        ratio is computed twice: for the choice in which most layers use `self.dense`, and for the choice in which most
        layers use `pair`. The larger ratio is returned.

        Args:
            link: the other speed of the link.
            pair: the compressor-collective pair in use at that speed.
            negligible_s: differences up to this many seconds are ignored.
        """
        most = 1.0
        for choice in (self.choice(self.dense), self.choice(pair)):
            low, high = sorted((self.cost_s(choice, link), self.cost_s(choice)))
            if high - low > negligible_s:
                most = max(most, high / low)
        return most

    def _dearer_than_dense(self, pair: Pair) -> set[int]:
        """Return the ids of the layers that cost less with `self.dense` (the pair of `bf16`) than with `pair`.

        With two pairs, each bucket needs additional messages. If these take longer than the layers save, return an
        empty set.
        """
        if all(kind.elementwise for kind in self._compressors[pair].traits.emits):
            return set()
        without_waves, gains = dataclasses.replace(self.link, wave_s=0.0), {}
        for layer in (layer for layer in self.layers if layer.numel > SMALL):
            pair_s, dense_s = (
                seen.seconds + exchange_s(other, seen.nbytes, layer.numel, without_waves, self._world_size)
                for other, seen in ((other, self._seen[other][layer.id]) for other in (pair, self.dense))
            )
            if pair_s > dense_s:
                gains[layer.id] = pair_s - dense_s
        more_s = len(self._buckets) * self.link.wave_s * 2 * (self._world_size - 1)
        return set(gains) if sum(gains.values()) > more_s else set()
