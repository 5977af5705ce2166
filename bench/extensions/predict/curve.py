"""Predictions over the rate of the links, beside dense gradients, and where both are equal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from bench.core.errors import UsageError
from bench.core.units import parse_rate
from bench.extensions.predict.calibration import Calibration
from bench.extensions.predict.checking import check_waits
from bench.extensions.predict.request import Asked
from bench.extensions.predict.ways import Way, dense_ways, fastest, ways_of

POINTS_PER_DECADE = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Steps over the rate of all links.

    Attributes:
        rates_bps: ascending.
        pair: steps of what was asked for, on the collective that is fastest there unless one was named.
        dense: of dense gradients in 16 bits, on the collective that is fastest there.
        break_even_bps: rates at which both are equal, by interpolation.
    """

    rates_bps: list[float]
    pair: list[Way]
    dense: list[Way]
    break_even_bps: list[float]

    @property
    def pays(self) -> list[bool]:
        """Where the pair is faster."""
        return [a.step_time_s < b.step_time_s for a, b in zip(self.pair, self.dense, strict=True)]


def sweep(calibration: Calibration, asked: Asked, rates_bps: Sequence[float]) -> Curve:
    """Predict at every rate.

    Raises:
        UsageError: as `check_asked`; or dense gradients in 16 bits are not calibrated, or ranks do not make their
            steps together.
    """
    check_waits(asked)
    pair, dense = (
        [fastest(calibration, [way.at_rate(rate) for way in ways]) for rate in rates_bps]
        for ways in (ways_of(calibration, asked), dense_ways(calibration, asked))
    )
    ratios = np.log([a.step_time_s / b.step_time_s for a, b in zip(pair, dense, strict=True)])
    logs = np.log(rates_bps)
    crossings = np.flatnonzero((ratios[:-1] < 0) != (ratios[1:] < 0))
    at = [logs[i] + (logs[i + 1] - logs[i]) * ratios[i] / (ratios[i] - ratios[i + 1]) for i in crossings]
    return Curve(rates_bps=list(rates_bps), pair=pair, dense=dense, break_even_bps=np.exp(at).tolist())


def parse_sweep(text: str, per_decade: int = POINTS_PER_DECADE) -> list[float]:
    """``bandwidth=1mbit..10gbit`` -> rates in bits per second, evenly on a logarithmic scale.

    Raises:
        UsageError: it is not of that form.
    """
    name, _, ends = text.partition("=")
    first, dots, last = ends.partition("..")
    if name.strip() != "bandwidth" or not dots:
        raise UsageError(f"--sweep '{text}' is not possible; write it like bandwidth=1mbit..10gbit")
    low, high = parse_rate(first.strip()), parse_rate(last.strip())
    if not low < high:
        raise UsageError(f"--sweep '{text}' does not ascend; write the slower rate first")
    points = max(2, round(per_decade * math.log10(high / low)) + 1)
    return [float(rate) for rate in np.geomspace(low, high, points)]
