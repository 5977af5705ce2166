"""A bucket of gradients, and the reports of an exchange: per layer for `layers.csv`, per step for the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from compressors.layer import Layer, Step
from compressors.parts.buckets import is_finite


@dataclasses.dataclass(kw_only=True, eq=False)
class Bucket:
    """The gradients that are reduced together, in DDP's order.

    Attributes:
        layers: the layers inside.
        gradients: this rank's gradients, one flat floating tensor per layer; replaced with `updates` once they are not
            needed any more, so that backward can reuse their memory.
        updates: one flat floating tensor per layer for the updates; by default the gradients themselves. A gradient
            that is not its own update tensor is only read.
        step: the training step.
        screen_: replaces NaN and infinity in tensors, so that they do not enter residuals; see `screen`. None: encode
            them.
        buffer: the memory of all updates, if they are screened.
        encoded: filled by the reducer, one entry per layer.
        encode_s: filled by the reducer, seconds of encoding and decoding.
    """

    layers: list[Layer]
    gradients: list[torch.Tensor]
    step: Step
    updates: list[torch.Tensor] = dataclasses.field(default_factory=list)
    screen_: Callable[[Sequence[torch.Tensor]], object] | None = None
    buffer: torch.Tensor | None = None
    encoded: list[EncodedLayer] = dataclasses.field(default_factory=list)
    encode_s: float = 0.0

    def __post_init__(self) -> None:
        self.updates = self.updates or self.gradients

    def screen(self) -> None:
        """Replace NaN and infinity in the gradients, which are then copied to the updates if they may not be changed.

        A reducer calls this before it encodes, or when it finds such a value.
        """
        if self.screen_ is None or (self.gradients is not self.updates and all(map(is_finite, self.gradients))):
            return
        for update, gradient in zip(self.updates, self.gradients, strict=True):
            if update is not gradient:
                update.copy_(gradient)
        self.gradients = self.updates
        self.screen_(self.updates if self.buffer is None else [self.buffer])

    def part(self, indices: Sequence[int]) -> Bucket:
        """Return a bucket of the layers at these indices, which is not screened, because the whole bucket is."""
        return Bucket(
            layers=[self.layers[index] for index in indices],
            gradients=[self.gradients[index] for index in indices],
            updates=[self.updates[index] for index in indices],
            step=self.step,
        )


@dataclasses.dataclass(kw_only=True)  # not frozen, because frozen ones take three times as long to create
class EncodedLayer:
    """The result of encoding one layer once.

    Attributes:
        layer: the layer.
        payload: name of the class of the payload (the encoded tensor), such as "Sparse".
        nbytes: bytes of the packed payload; if it covers several layers, this layer's share of them.
        num_entries: number of elements that are transmitted.
        seconds: time spent in encoding.
        density_wanted: share of the layer's entries that the compressor aims to send; None if it has no target.
    """

    layer: Layer
    payload: str
    nbytes: float
    num_entries: int
    seconds: float
    density_wanted: float | None = None


@dataclasses.dataclass(kw_only=True)
class StepReport:
    """The results of one step's exchange on this rank.

    Attributes:
        skipped: True if a gradient was not finite on some rank, so that the optimizer step must be skipped.
        encode_s: seconds in which the communication thread encoded and decoded; None if not known.
        exchange_s: seconds in which the communication thread was busy, encoding included; None if not known.
        exposed_s: seconds from the arrival of the last bucket to the last result, and those in which the optimizer
            waited; None if not known, because PyTorch hides it.
        update_s: seconds of the optimizer's step, with what it exchanges.
        update_exposed_s: seconds of the optimizer's step in which it waited; part of `exposed_s`.
        encoded: one entry per layer and message that it was part of.
        num_steps: optimizer steps of all ranks together so far, where `world_size` batches count as one step, whichever
            ranks processed them. None if ranks make their steps together: one more than before.
        counts: numbers by name that are added up over the run, such as `factor_fallbacks`; the same on all ranks.
        figures: numbers by name of which the row has mean and largest, such as the `staleness` of a gradient.
        decision: the decision about how gradients are sent that was used in this step, such as `Choice` of `auto`; a
            resumed run makes it again. Its `step` is the first one that it applies to, `to_dict` returns values for
            JSON, `columns(layers)` those of `metrics.csv`, `layer_columns(layer)` those of `layers.csv`. None if none
            is made.
    """

    skipped: bool = False
    encode_s: float | None = None
    exchange_s: float | None = None
    exposed_s: float | None = None
    update_s: float = 0.0
    update_exposed_s: float = 0.0
    encoded: list[EncodedLayer] = dataclasses.field(default_factory=list)
    num_steps: int | None = None
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    figures: dict[str, float] = dataclasses.field(default_factory=dict)
    decision: Any = None

    def add(self, other: StepReport) -> None:
        """Add the times, layers and counts of another exchange in the same step; times that are None stay None."""
        for name in ("encode_s", "exchange_s", "exposed_s"):
            if (seconds := getattr(self, name)) is not None:
                setattr(self, name, seconds + (getattr(other, name) or 0.0))
        self.encoded += other.encoded
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
