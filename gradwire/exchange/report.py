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
        gradients: this rank's gradients, one flat floating tensor per layer; this list is replaced with `updates` once
            the gradients are no longer needed, so that backward can reuse their memory.
        updates: one flat floating tensor per layer, to which the layer's update is written; by default the gradients
            themselves. If a layer has a separate update tensor, its gradient is only read.
        step: the training step.
        screen_: replaces NaN and infinity in tensors, so that these values do not enter residuals; see `screen`. None:
            encode such values.
        buffer: the memory of all updates, with which `screen_` is called; None: `screen_` is called with the updates.
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
        """Replace NaN and infinity in the gradients; gradients that are only read are first copied to the updates.

        A reducer calls this method before it encodes, or when it finds such a value.
        """
        if self.screen_ is None or (self.gradients is not self.updates and all(map(is_finite, self.gradients))):
            return
        for update, gradient in zip(self.updates, self.gradients, strict=True):
            if update is not gradient:
                update.copy_(gradient)
        self.gradients = self.updates
        self.screen_(self.updates if self.buffer is None else [self.buffer])

    def part(self, indices: Sequence[int]) -> Bucket:
        """Return a bucket of the layers at these indices, without `screen_`, because the whole bucket is screened."""
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
        exchange_s: seconds in which the communication thread was busy, including encoding; None if not known.
        exposed_s: seconds in which training waited: from the arrival of the last bucket to the last result, and during
            the optimizer's exchanges; None if not known, because PyTorch hides this time.
        update_s: seconds of the optimizer's step, including its exchanges.
        update_exposed_s: seconds in which the optimizer's step waited for its exchanges; part of `exposed_s`.
        encoded: one entry for each layer in each message.
        num_steps: number of optimizer steps of the run so far, where any `world_size` batches count as one step,
            whichever ranks processed them. None if all ranks make their steps together, so that the number grows by 1.
        counts: numbers by name that are added up over the run, such as `factor_fallbacks`; the same on all ranks.
        figures: numbers by name, such as the `staleness` of a gradient; a row of metrics.csv contains their mean and
            maximum.
        decision: the decision about how to send gradients that was used in this step, such as the `Choice` of `auto`; a
            resumed run makes the same decision again. Attribute `step` is the first step to which the decision applies,
            `to_dict` returns values for JSON, `columns(layers)` returns columns of `metrics.csv`, and
            `layer_columns(layer)` returns columns of `layers.csv`. None if no decision is made.
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
