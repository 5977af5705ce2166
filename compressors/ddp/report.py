"""What a step's exchange reports: per layer for `layers.csv`, per step for the training loop."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from compressors.layer import Layer

if TYPE_CHECKING:
    from compressors.choice import Choice


from collections.abc import Callable, Sequence

import torch

from compressors.layer import Step


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


@dataclasses.dataclass(kw_only=True)  # frozen ones take three times as long to make, and there are many
class EncodedLayer:
    """What one encode produced for one layer.

    Attributes:
        payload: name of its kind.
        nbytes: of the packed payload; a share of it where one payload covers several layers.
        num_entries: elements that are transmitted.
        seconds: spent in encoding.
        density_wanted: share of the entries that the compressor meant to send; None where it has no such aim.
    """

    layer: Layer
    payload: str
    nbytes: float
    num_entries: int
    seconds: float
    density_wanted: float | None = None


@dataclasses.dataclass(kw_only=True)
class StepReport:
    """What one step's exchange did on this rank.

    Attributes:
        skipped: a rank saw a non-finite gradient; the optimizer step must be left out.
        encode_s, exchange_s: busy seconds of the communication thread; encoding is part of both. None: not known.
        exposed_s: seconds between the last bucket's arrival and the last result. None: the engine hides it.
        encoded: one entry per layer and message that it was part of.
        staleness: versions of the parameters that the gradient was behind when it was applied. None: nothing is stale.
        factor_fallbacks: symmetric matrices that could not be sent or factored as asked. None: there were none to send.
        factor_updates_skipped: times that all of them were left out, because one was not finite; likewise.
        choice: which way each layer went, where that is found out while training.
    """

    skipped: bool = False
    encode_s: float | None = None
    exchange_s: float | None = None
    exposed_s: float | None = None
    encoded: list[EncodedLayer] = dataclasses.field(default_factory=list)
    staleness: int | None = None
    factor_fallbacks: int | None = None
    factor_updates_skipped: int | None = None
    choice: Choice | None = None

    def add(self, other: StepReport) -> None:
        """Add what else was exchanged in this step, with nothing done meanwhile; what is not known stays so."""
        if self.encode_s is not None:
            self.encode_s += other.encode_s or 0.0
        if self.exchange_s is not None:
            self.exchange_s += other.exchange_s or 0.0
        if self.exposed_s is not None:
            self.exposed_s += other.exposed_s or 0.0
        self.encoded += other.encoded
        self.factor_fallbacks = add_counts(self.factor_fallbacks, other.factor_fallbacks)
        self.factor_updates_skipped = add_counts(self.factor_updates_skipped, other.factor_updates_skipped)


def add_counts(a: int | None, b: int | None) -> int | None:
    """Return the sum; None where there was nothing to count on either side."""
    return None if a is None and b is None else (a or 0) + (b or 0)
