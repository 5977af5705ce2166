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
from collections.abc import Sequence
from typing import Literal

from bench.report.student import two_sided_p, two_sided_quantile

CONFIDENCE = 0.95
FEWEST_SEEDS = 3  # below this an interval is too wide to say anything
MOST_SEEDS = 50
_ROUNDING = 1e-9  # of a value; a spread below is that of its last digits

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
        low, high: its 95 % interval, None where a side has one value.
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
    mean, variance = _mean_and_variance(values)
    if n == 1:
        return Estimate(mean=mean, sd=None, low=None, high=None, n=1)
    sd = math.sqrt(variance)
    half = _t_quantile(n - 1) * sd / math.sqrt(n)
    return Estimate(mean=mean, sd=sd, low=mean - half, high=mean + half, n=n)


def difference(
    baseline: Sequence[float], candidate: Sequence[float], *, paired: bool = False, counted: bool = False
) -> Effect | None:
    """Candidate's mean minus the baseline's.

    Args:
        baseline: one value per seed.
        candidate: likewise.
        paired: values at the same place belong to the same seed, and what both sides share drops out (Student's
            interval of the differences); without, Welch's.
        counted: figures that repeat exactly, whatever the seed; of others a spread of zero over a few seeds is
            chance, or as coarse as evaluations are.

    Returns:
        None where a side has no value.
    """
    if not baseline or not candidate:
        return None
    value = _mean_and_variance(candidate)[0] - _mean_and_variance(baseline)[0]
    if len(baseline) < 2 or len(candidate) < 2:
        return Effect(value=value, low=None, high=None, p=None)
    variance, degrees = _of_pairs(baseline, candidate) if paired else _of_welch(baseline, candidate)
    if variance <= (_ROUNDING * value) ** 2:
        return _without_spread(value, 0.0 if counted else _p_of_order(len(baseline), len(candidate), paired=paired))
    half = _t_quantile(degrees) * math.sqrt(variance)
    return Effect(value=value, low=value - half, high=value + half, p=two_sided_p(value / math.sqrt(variance), degrees))


def _without_spread(value: float, p: float) -> Effect:
    """Where the t-interval is a point: it is known where order alone would tell, or where there is no difference."""
    if value == 0.0:
        return Effect(value=value, low=value, high=value, p=1.0)
    bound = value if p < 1.0 - CONFIDENCE else None
    return Effect(value=value, low=bound, high=bound, p=p)


def _p_of_order(num_baseline: int, num_candidates: int, *, paired: bool) -> float:
    """How likely it is by chance that all values of one side, or of each pair, are above the other's; two-sided."""
    return 2.0 ** (1 - num_baseline) if paired else 2.0 / math.comb(num_baseline + num_candidates, num_baseline)


def _of_pairs(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[float, float]:
    """Variance of the mean difference, and its degrees of freedom."""
    differences = [mine - theirs for theirs, mine in zip(baseline, candidate, strict=True)]
    return _mean_and_variance(differences)[1] / len(differences), len(differences) - 1


def _of_welch(baseline: Sequence[float], candidate: Sequence[float]) -> tuple[float, float]:
    """Variance of the difference of two means, and its degrees of freedom; 0 of them where the variance is 0."""
    parts = [_mean_and_variance(values)[1] / len(values) for values in (baseline, candidate)]
    variance = sum(parts)
    if variance == 0.0:
        return 0.0, 0.0
    shares = [part / variance for part in parts]
    sizes = (len(baseline), len(candidate))
    return variance, 1.0 / sum(share**2 / (n - 1) for share, n in zip(shares, sizes, strict=True))


def improvement(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    higher_is_better: bool,
    paired: bool = False,
    counted: bool = False,
) -> Effect | None:
    """By which factor the candidate is better than the baseline: above 1 is better, whichever way the metric points.

    The factor is the ratio of geometric means; its interval is that of ``difference`` on the logarithms, so that
    baseline and candidate exchanged give exactly the inverse.

    Returns:
        None where a side has no value or a value is not positive (no ratio exists).
    """
    if min((*baseline, *candidate), default=0.0) <= 0.0:
        return None
    logs = [[math.log(value) for value in values] for values in (baseline, candidate)]
    effect = difference(*(logs if higher_is_better else logs[::-1]), paired=paired, counted=counted)
    if effect is None:
        return None
    low, high = (None if bound is None else _factor(bound) for bound in (effect.low, effect.high))
    return Effect(value=_factor(effect.value), low=low, high=high, p=effect.p)


def holm(p_values: Sequence[float | None], *, tables: int = 1) -> list[float | None]:
    """Holm's adjustment: the p-values to use where several candidates are tested against one baseline.

    Args:
        p_values: one per candidate; None (not testable) stays None and does not count.
        tables: how often candidates are tested, each time by something else (Bonferroni).
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (p, index) in enumerate(order):
        worst = max(worst, min(1.0, p * (len(order) - rank) * tables))
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


def seeds_needed(effect: Effect, *, half_width: float, n: int, comparisons: int = 1) -> int | None:
    """How many seeds on each side would shrink an interval to plus or minus ``half_width``, if the spread stays.

    Args:
        effect: an effect.
        half_width: the wanted half width, in the effect's own unit.
        n: seeds that the effect rests on, the smaller side.
        comparisons: among which it must hold (Bonferroni, as Holm's first).

    Returns:
        At least ``n + 1``; None where even ``MOST_SEEDS`` would not do.
    """
    if effect.low is None or effect.high is None:
        return FEWEST_SEEDS
    spread = (effect.high - effect.low) / 2.0 / _half_width_per_sd(n)
    enough = (m for m in range(n + 1, MOST_SEEDS + 1) if spread * _half_width_per_sd(m, comparisons) <= half_width)
    return next(enough, None)


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and the sample variance, which is 0 for one value; values that are all equal have no rounding error."""
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _factor(logarithm: float) -> float:
    """The factor of which this is the logarithm; 1e100 for all that are larger, which no float might hold."""
    return math.exp(min(logarithm, math.log(1e100)))


def _half_width_per_sd(n: int, comparisons: int = 1) -> float:
    """Half width of the interval of a difference between two sides of n values each, but for a constant factor."""
    return two_sided_quantile((1.0 - CONFIDENCE) / comparisons, 2 * (n - 1)) / math.sqrt(n)


def _t_quantile(degrees: float) -> float:
    return two_sided_quantile(1.0 - CONFIDENCE, degrees)
