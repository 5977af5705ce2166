"""What a step's exchange reports: per layer for `layers.csv`, per step for the training loop."""

from __future__ import annotations

import dataclasses

from compressors.layer import Layer


@dataclasses.dataclass(frozen=True, kw_only=True)
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
        encoded: one entry per layer.
        staleness: versions of the parameters that the gradient was behind when it was applied. None: nothing is stale.
    """

    skipped: bool = False
    encode_s: float | None = None
    exchange_s: float | None = None
    exposed_s: float | None = None
    encoded: list[EncodedLayer] = dataclasses.field(default_factory=list)
    staleness: int | None = None
