"""Statistics over seeds: means with intervals, effects with intervals, and the verdict that these allow.

Source: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
involved", Biometrika 34 (1947); S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian
Journal of Statistics 6 (1979); D. J. Schuirmann on equivalence, J. Pharmacokinetics and Biopharmaceutics 15 (1987).

The seed is the unit of replication: every number here is one value per seed, never one per step. Intervals are
Student's t at any number of seeds: a bootstrap over a handful of values covers far less than it promises.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Literal

CONFIDENCE = 0.95
FEWEST_SEEDS = 3  # below this an interval is too wide to say anything
MOST_SEEDS = 50

Significance = Literal["above", "below", "same", "unclear"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of n values and what is known of it.

    Attributes:
        mean: arithmetic mean.
        sd: sample standard deviation, None with one value.
        low, high: the mean's 95 % t-interval, None with one value.
        n: number of values, at least 1.
    """

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """How far a candidate is from a baseline.

    Attributes:
        value: a factor or a difference.
        low, high: its 95 % Welch interval, None where a side has one value.
        p: two-sided probability of an effect at least this large if there were none, None likewise.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, spread and t-interval of one value per seed; None without values."""
    n = len(values)
    if n == 0:
        return None
    mean = statistics.mean(values)
    if n == 1:
        return Estimate(mean=mean, sd=None, low=None, high=None, n=1)
    sd = statistics.stdev(values)
    half = _t_quantile(n - 1) * sd / math.sqrt(n)
    return Estimate(mean=mean, sd=sd, low=mean - half, high=mean + half, n=n)


def difference(baseline: Sequence[float], candidate: Sequence[float]) -> Effect | None:
    """Candidate's mean minus the baseline's, with Welch's interval; None where a side has no value."""
    if not baseline or not candidate:
        return None
    value = statistics.mean(candidate) - statistics.mean(baseline)
    if len(baseline) < 2 or len(candidate) < 2:
        return Effect(value=value, low=None, high=None, p=None)
    baseline_variance = statistics.variance(baseline) / len(baseline)
    candidate_variance = statistics.variance(candidate) / len(candidate)
    variance = baseline_variance + candidate_variance
    if variance == 0.0:  # counted figures repeat exactly: what differs, differs for certain
        return Effect(value=value, low=value, high=value, p=1.0 if value == 0.0 else 0.0)
    share = baseline_variance / variance
    degrees = 1.0 / (share**2 / (len(baseline) - 1) + (1.0 - share) ** 2 / (len(candidate) - 1))
    half = _t_quantile(degrees) * math.sqrt(variance)
    return Effect(
        value=value, low=value - half, high=value + half, p=_two_sided_p(value / math.sqrt(variance), degrees)
    )


def improvement(baseline: Sequence[float], candidate: Sequence[float], *, higher_is_better: bool) -> Effect | None:
    """By which factor the candidate is better than the baseline: above 1 is better, whichever way the metric points.

    The factor is the ratio of geometric means; its interval is Welch's on the logarithms, so that baseline and
    candidate exchanged give exactly the inverse.

    Returns:
        None where a side has no value or a value is not positive (no ratio exists).
    """
    if min((*baseline, *candidate), default=0.0) <= 0.0:
        return None
    logs = [[math.log(value) for value in values] for values in (baseline, candidate)]
    effect = difference(*(logs if higher_is_better else logs[::-1]))
    if effect is None:
        return None
    low, high = (None if bound is None else _factor(bound) for bound in (effect.low, effect.high))
    return Effect(value=_factor(effect.value), low=low, high=high, p=effect.p)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's adjustment: the p-values to use where several candidates are tested against one baseline.

    None (not testable) stays None and does not count.
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (p, index) in enumerate(order):
        worst = max(worst, min(1.0, p * (len(order) - rank)))
        adjusted[index] = worst
    return adjusted


def judge(effect: Effect, *, same: tuple[float, float], p: float | None) -> Significance:
    """What may be said of an effect.

    Args:
        effect: a factor or difference with its interval.
        same: effects in this range are of no practical matter.
        p: the effect's p-value, adjusted for the number of comparisons; None where it cannot be tested.

    Returns:
        "above" or "below": beyond the range and significantly different; "same": the whole interval lies in the
        range; "unclear": neither, always so where a side has one value.
    """
    if effect.low is None or effect.high is None or p is None:
        return "unclear"
    if same[0] <= effect.low and effect.high <= same[1]:
        return "same"
    if p < 1.0 - CONFIDENCE and not same[0] <= effect.value <= same[1]:
        return "above" if effect.value > same[1] else "below"
    return "unclear"


def seeds_needed(effect: Effect, *, half_width: float, n: int) -> int | None:
    """How many seeds on each side would shrink an interval to plus or minus ``half_width``, if the spread stays.

    Args:
        effect: an effect.
        half_width: the wanted half width, in the effect's own unit.
        n: seeds that the effect rests on, the smaller side.

    Returns:
        At least ``n + 1``; None where even ``MOST_SEEDS`` would not do.
    """
    if effect.low is None or effect.high is None:
        return FEWEST_SEEDS
    spread = (effect.high - effect.low) / 2.0 / _half_width_per_sd(n)
    return next((m for m in range(n + 1, MOST_SEEDS + 1) if spread * _half_width_per_sd(m) <= half_width), None)


def _factor(logarithm: float) -> float:
    """The factor of which this is the logarithm; 1e100 for all that are larger, which no float might hold."""
    return math.exp(min(logarithm, math.log(1e100)))


def _half_width_per_sd(n: int) -> float:
    """Half width of the interval of a difference between two sides of n values each, but for a constant factor."""
    return _t_quantile(2 * (n - 1)) / math.sqrt(n)


def _t_quantile(degrees: float) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, (1.0 + CONFIDENCE) / 2.0))


def _two_sided_p(t: float, degrees: float) -> float:
    from scipy.special import stdtr

    return float(2.0 * stdtr(degrees, -abs(t)))
