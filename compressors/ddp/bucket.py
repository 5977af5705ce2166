"""Bucket: some layers' gradients at one step, as DDP hands them over."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from compressors.ddp.report import EncodedLayer
from compressors.layer import Layer, Step


@dataclasses.dataclass(kw_only=True, eq=False)
class Bucket:
    """What a reducer works on, in the order in which the engine laid it.

    Attributes:
        layers: the layers inside.
        gradients: one flat floating tensor per layer, this rank's gradient.
        updates: where the updates go, likewise; the gradients themselves unless given. A gradient that lies elsewhere
            is only read.
        step: where training is.
        screen: keeps what is not finite in `gradients` away from all that remembers; a reducer calls it before it
            encodes, or where it finds such a value while it does. Whether other gradients have taken their place.
        encoded: filled by the reducer, one entry per layer.
        encode_s: filled by the reducer, seconds of encoding and decoding.
    """

    layers: list[Layer]
    gradients: list[torch.Tensor]
    step: Step
    updates: list[torch.Tensor] = dataclasses.field(default_factory=list)
    screen: Callable[[], bool] = lambda: False
    encoded: list[EncodedLayer] = dataclasses.field(default_factory=list)
    encode_s: float = 0.0

    def __post_init__(self) -> None:
        self.updates = self.updates or self.gradients

    def part(self, indices: Sequence[int]) -> Bucket:
        """Some of its layers, by where they stand in it; screened with the whole."""
        return Bucket(
            layers=[self.layers[index] for index in indices],
            gradients=[self.gradients[index] for index in indices],
            updates=[self.updates[index] for index in indices],
            step=self.step,
        )

    @property
    def is_laid_down(self) -> bool:
        """Whether all gradients lie where their updates go."""
        return self.gradients is self.updates

    def lay_down(self) -> None:
        """Copy gradients that lie elsewhere to where the updates go, which any one may change."""
        for update, gradient in zip(self.updates, self.gradients, strict=True):
            if update is not gradient:
                update.copy_(gradient)
        self.let_go()

    def let_go(self) -> None:
        """Keep gradients that lie elsewhere no longer: backward has use for their memory."""
        self.gradients = self.updates
