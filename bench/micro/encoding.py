"""One compressor on given gradients: how long it takes, what it packs, and how far that is from what it was given."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any, cast

import torch

from bench.core import spec
from bench.core.config.measurements import CompressorsConfig
from bench.train.clock import device_time
from collectives.base import Key
from collectives.payloads.base import Payload, unpack
from collectives.transport.base import SingleRank
from compressors.base import FP32_BYTES, Compressor
from compressors.ddp.encode_group import group_layers
from compressors.ddp.reducer import reducer_for
from compressors.ddp.report import Bucket
from compressors.layer import Layer, Step

WARMUP_TURNS = 2  # buffers are made, state that is carried on settles


@dataclasses.dataclass(kw_only=True)
class Turn:
    """What one pass over a gradient took and gave.

    Attributes:
        encode_s: until the last message is packed; momentum, residual and earlier rounds included.
        decode_s: from there until the update lies in the gradient's place.
        packed_bytes: messages with their headers.
        num_entries: elements that were transmitted.
        given, error, product: |x|^2, |x - C(x)|^2 and <x, C(x)>, x being what was to be sent.
        sent: |C(x)|^2.
    """

    encode_s: float = 0.0
    decode_s: float = 0.0
    packed_bytes: int = 0
    num_entries: int = 0
    given: float = 0.0
    error: float = 0.0
    product: float = 0.0
    sent: float = 0.0


class Encoding:
    """A compressor at work on gradients of some layers.

    Args:
        config: of the measurement.
        compressor: spec text.
        layers: in model order.
    """

    def __init__(self, config: CompressorsConfig, compressor: str, layers: Sequence[Layer]) -> None:
        self.name = compressor
        self._config = config
        self._compressor = cast(Compressor, spec.build("compressors", compressor))
        self._reducer = reducer_for(self._compressor)
        self._alone = SingleRank()
        self._layers = layers
        limit = math.inf if self._compressor.one_bucket else config.bucket_mb * 2**20
        self._buckets = buckets_of(layers, limit)
        self._units = [unit for bucket in self._buckets for unit in group_layers(self._compressor, bucket)]
        self._turns: list[Turn] = []
        self._squares: dict[tuple[int, ...], list[float]] = {unit.key: [] for unit in self._units if not unit.dense}
        self._num_passes = 0

    def take_turn(self, gradient: torch.Tensor) -> None:
        """Pass over a gradient, fp32 [numel of all layers]; the first few passes are not counted."""
        work = gradient.clone()
        turn = self._pass(work)
        if self._num_passes > WARMUP_TURNS:
            self._compare(turn, gradient, work)
            self._turns.append(turn)

    def row(self) -> dict[str, Any]:
        """The columns of `COMPRESSORS`, but for what all rows share."""
        numel = sum(layer.numel for layer in self._layers)
        encode_s = statistics.median(turn.encode_s for turn in self._turns)
        decode_s = statistics.median(turn.decode_s for turn in self._turns)
        packed_bytes = statistics.fmean(turn.packed_bytes for turn in self._turns)
        return {
            "compressor": self.name,
            "numel": numel,
            "dense_bytes": FP32_BYTES * numel,
            "packed_bytes": packed_bytes,
            "compression_ratio": FP32_BYTES * numel / packed_bytes,
            "bits_per_element": 8 * packed_bytes / numel,
            "effective_density": statistics.fmean(turn.num_entries / numel for turn in self._turns),
            "relative_error": statistics.fmean(_ratio(t.error, t.given) ** 0.5 for t in self._turns),
            "cosine": statistics.fmean(_ratio(t.product, (t.given * t.sent) ** 0.5) for t in self._turns),
            "contraction_seen": max(map(statistics.fmean, self._squares.values()), default=0.0),
            "contraction_proved": self._proved(),
            "encode_s": encode_s,
            "encode_Bps": FP32_BYTES * numel / encode_s,
            "decode_s": decode_s,
            "decode_Bps": FP32_BYTES * numel / decode_s,
        }

    def _pass(self, work: torch.Tensor) -> Turn:
        """Replace a gradient by what arrives of it."""
        config = self._config
        views = self._by_layer(work)
        step = Step(index=self._num_passes, epoch=0, rank=0, world_size=1, seed=config.seed, warmup=False)
        turn = Turn()
        for layers in self._buckets:
            bucket = Bucket(layers=layers, gradients=[views[layer.id] for layer in layers], step=step)
            started = packed_at = device_time(work.device)

            def travel(payload: Payload, key: Key) -> Payload:
                """Pack and unpack a message, of which there may be several."""
                nonlocal packed_at
                packed = payload.pack()
                turn.packed_bytes += packed.numel()
                packed_at = device_time(packed.device)
                return unpack(packed)

            self._reducer.reduce(bucket, travel, self._alone)
            turn.encode_s += packed_at - started
            turn.decode_s += device_time(work.device) - packed_at
            turn.num_entries += sum(encoded.num_entries for encoded in bucket.encoded)
        self._reducer.commit()
        self._num_passes += 1
        return turn

    def _compare(self, turn: Turn, gradient: torch.Tensor, update: torch.Tensor) -> None:
        """What was to be sent is the gradient or, where the rest is kept, what arrived and the rest together."""
        given, arrived = self._by_layer(gradient), self._by_layer(update)
        kept = self._reducer.state_dict()["residuals"]
        for unit in self._units:
            unit_given, unit_error = 0.0, 0.0
            for layer in unit.layers:
                sent = arrived[layer.id].double()
                lost = kept[layer.id].double() if layer.id in kept else given[layer.id] - sent
                x = sent + lost
                unit_given += float(x @ x)
                unit_error += float(lost @ lost)
                turn.product += float(x @ sent)
                turn.sent += float(sent @ sent)
            turn.given += unit_given
            turn.error += unit_error
            if not unit.dense:
                self._squares[unit.key].append(_ratio(unit_error, unit_given))

    def _proved(self) -> float | None:
        bounds = [self._compressor.contraction_bound(unit.layer) for unit in self._units if not unit.dense]
        known = [bound for bound in bounds if bound is not None]
        return max(known, default=0.0) if len(known) == len(bounds) else None

    def _by_layer(self, flat: torch.Tensor) -> dict[int, torch.Tensor]:
        parts = torch.split(flat, [layer.numel for layer in self._layers])
        return {layer.id: part for layer, part in zip(self._layers, parts, strict=True)}


def buckets_of(layers: Sequence[Layer], limit_bytes: float) -> list[list[Layer]]:
    """Buckets as DDP lays them: from the last layer to the first, each closed as soon as it reaches the limit."""
    buckets: list[list[Layer]] = [[]]
    nbytes = 0
    for layer in reversed(layers):
        if nbytes >= limit_bytes:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(layer)
        nbytes += FP32_BYTES * layer.numel
    return buckets


def _ratio(part: float, whole: float) -> float:
    """0 where there is nothing of either."""
    return part / whole if whole else 0.0
