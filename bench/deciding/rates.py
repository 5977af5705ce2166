"""Find the highest rate of the link at which a method is still faster."""

import math
from collections.abc import Sequence

from bench.report.statistics import break_even

# Rates up to 16 times that of the link are tried, but not rates that two cores cannot emulate well.
_LARGEST_FACTOR, _LARGEST_BPS = 16.0, 200e6


def rates_to_try(bps: float) -> list[float]:
    """Return the link's rate and two higher ones, in bit/s and from low to high."""
    highest = min(_LARGEST_FACTOR * bps, max(2.0 * bps, _LARGEST_BPS))
    return [bps, math.sqrt(bps * highest), highest]


def crossing(rates: Sequence[float], factors: Sequence[float]) -> float:
    """Return the rate in bit/s at which a factor falls to 1, or infinity if the factor stays above 1.

    The rate is interpolated between the given rates on logarithmic scales.

    Args:
        rates: rates of the link in bit/s, from low to high.
        factors: for each rate, how many times sooner a method reaches the target than the baseline.
    """
    edges = break_even(list(zip(rates, factors, strict=True)))
    return edges[-1] if edges else math.inf if factors[-1] > 1.0 else rates[0]
