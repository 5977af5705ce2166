"""What a step's exchange reports: per layer for `layers.csv`, per step for the training loop."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from compressors.layer import Layer

if TYPE_CHECKING:
    from compressors.choice import Choice


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
