"""Statistics over seeds: means and effects with confidence intervals, and the verdicts that they allow.

Source: B. L. Welch, "The generalization of 'Student's' problem when several different population variances are
involved", Biometrika 34 (1947); S. Holm, "A simple sequentially rejective multiple test procedure", Scandinavian
Journal of Statistics 6 (1979); D. J. Schuirmann on equivalence, J. Pharmacokinetics and Biopharmaceutics 15 (1987).

The seed is the unit of replication: every value here is the result of a whole run with one seed, never of one step.
Intervals use Student's t distribution for any number of seeds, because 95 % intervals that are bootstrapped from a few
values contain the true mean far less often than 95 % of the time.
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

from bench.report import anytime
from bench.report.anytime import Conclusion

CONFIDENCE = 0.95
FEWEST_SEEDS = 3  # with fewer seeds an interval is too wide to be useful
MOST_SEEDS = 50
_ROUNDING = 1e-9  # a spread smaller than this share of the value is rounding

# "fixed": the number of seeds was chosen before the first run. "anytime": seeds may be added until the result is clear.
SeedRule = Literal["fixed", "anytime"]


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability that a value of Student's t distribution is at least as far from zero as ``t``.

    Args:
        t: the value to compare with, positive or negative.
        degrees: degrees of freedom.
    """
    return 2.0 * float(_scipy_special().stdtr(degrees, -abs(t)))


def two_sided_quantile(p: float, degrees: float) -> float:
    """Return the t > 0 with ``two_sided_p(t, degrees) == p``."""
    return -float(_scipy_special().stdtrit(degrees, p / 2.0))


def _scipy_special() -> Any:
    os.environ.pop("SOURCE_DATE_EPOCH", None)  # scipy imports numpy's f2py, which fails if the value is invalid
    from scipy import special

    return special


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeanEstimate:
    """The mean of n values, their spread, and a confidence interval of the mean.

    Attributes:
        mean: arithmetic mean.
        sd: sample standard deviation of the values; None if n is 1.
        low, high: bounds of the mean's 95 % t-interval; None if n is 1.
        n: number of values, at least 1.
    """

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    n: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """How a candidate differs from a baseline: by a factor or a difference, with its interval and p-value.

    Attributes:
        value: a factor (1 if there is no effect) or a difference (0 if there is none).
        low, high: bounds of the 95 % interval; None if there is no interval, for example with one value per side.
        p: two-sided p-value; None if either side has only one value.
    """

    value: float
    low: float | None
    high: float | None
    p: float | None

    def on_scale(self, function: Callable[[float], float]) -> Self:
        """Return the effect with an increasing function applied to its value and bounds."""
        low, high = (None if bound is None else function(bound) for bound in (self.low, self.high))
        return dataclasses.replace(self, value=function(self.value), low=low, high=high)


def estimate(values: Sequence[float]) -> MeanEstimate | None:
    """Return the mean, standard deviation and t-interval of `values`, one per seed; None if there are no values."""
    n = len(values)
    if n < 2:
        return MeanEstimate(mean=values[0], sd=None, low=None, high=None, n=1) if n else None
    mean, variance = _mean_and_variance(values)
    sd = math.sqrt(variance)
    half = two_sided_quantile(1.0 - CONFIDENCE, n - 1) * sd / math.sqrt(n)
    return MeanEstimate(mean=mean, sd=sd, low=mean - half, high=mean + half, n=n)


def difference(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    paired: bool = False,
    counted: bool = False,
    rule: SeedRule = "fixed",
) -> Effect | None:
    """Return the mean of the candidate's values minus the mean of the baseline's values, with interval and p-value.

    Args:
        baseline: one value per seed.
        candidate: one value per seed.
        paired: True if values at the same index belong to the same seed; the interval is then Student's, over the
            differences within these pairs. If False, the interval is Welch's.
        counted: True if the values are counts that do not depend on the seed; a difference without any spread then has
            a p-value of 0. If False, zero spread over a few seeds is a coincidence or due to the coarse steps of
            accuracy; the p-value is then the probability that random values would lie in this order.
        rule: "anytime" keeps the interval and p-value of paired values valid even if seeds are added until the result
            is clear, but needs more seeds than "fixed".

    Returns:
        None if a side has no value.
    """
    if not baseline or not candidate:
        return None
    sides = (baseline, candidate)
    sizes = [len(values) for values in sides]
    (theirs, their_variance), (ours, our_variance) = map(_mean_and_variance, sides)
    value = ours - theirs
    if min(sizes) < 2 or (rule == "anytime" and not paired and not counted):
        return Effect(value=value, low=None, high=None, p=None)
    if paired:
        differences = [mine - other for other, mine in zip(baseline, candidate, strict=True)]
        if rule == "anytime" and not counted:
            low, high = anytime.interval(differences, 1.0 - CONFIDENCE)
            known = (low, high) if low > -math.inf else (None, None)
            return Effect(
                value=value, low=known[0], high=known[1], p=math.exp(-max(0.0, anytime.log_e_value(differences)))
            )
        variance, degrees = _mean_and_variance(differences)[1] / len(differences), len(differences) - 1.0
    else:
        parts = [their_variance / sizes[0], our_variance / sizes[1]]
        variance = sum(parts)
        shares = [part / variance if variance else 1.0 for part in parts]
        degrees = 1.0 / sum(share**2 / (n - 1) for share, n in zip(shares, sizes, strict=True))
    if variance <= (_ROUNDING * value) ** 2:
        # If there is no effect: the probability that random values put one side, either one, above the other in all
        # values, or in all pairs.
        p = 2.0 ** (1 - sizes[0]) if paired else 2.0 / math.comb(sum(sizes), sizes[0])
        if value == 0.0:
            return Effect(value=value, low=value, high=value, p=1.0)
        p = 0.0 if counted else p
        bound = value if p < 1.0 - CONFIDENCE else None  # an interval only if the order alone is significant
        return Effect(value=value, low=bound, high=bound, p=p)
    half = two_sided_quantile(1.0 - CONFIDENCE, degrees) * math.sqrt(variance)
    return Effect(value=value, low=value - half, high=value + half, p=two_sided_p(value / math.sqrt(variance), degrees))


def improvement(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    higher_is_better: bool,
    paired: bool = False,
    counted: bool = False,
    rule: SeedRule = "fixed",
) -> Effect | None:
    """Return the factor by which the candidate is better than the baseline, above 1 if it is better.

    The factor is the ratio of the geometric means. Its interval comes from the `difference` of logarithms, so
    exchanging baseline and candidate gives exactly the inverse.

    Args:
        baseline: one value per seed.
        candidate: one value per seed.
        higher_is_better: if False, the side with the lower mean is better.
        paired: as for `difference`.
        counted: as for `difference`.
        rule: as for `difference`.

    Returns:
        None if a side has no value, or if any value is zero or negative.
    """
    if min((*baseline, *candidate), default=0.0) <= 0.0:
        return None
    logs = [[math.log(value) for value in values] for values in (baseline, candidate)]
    effect = difference(*(logs if higher_is_better else logs[::-1]), paired=paired, counted=counted, rule=rule)
    return effect.on_scale(_factor) if effect else None


def holm(p_values: Sequence[float | None], *, tables: int = 1) -> list[float | None]:
    """Return p-values adjusted by Holm's method for several candidates that are tested against one baseline.

    Args:
        p_values: one p-value per candidate; None if a candidate cannot be tested. Such an entry stays None and does not
            count as a test.
        tables: number of quantities in which the same candidates are tested, each in a table of its own. The p-values
            are also multiplied by this number (Bonferroni).
    """
    order = sorted((p, index) for index, p in enumerate(p_values) if p is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    worst = 0.0
    for rank, (p, index) in enumerate(order):
        worst = max(worst, min(1.0, p * (len(order) - rank) * tables))
        adjusted[index] = worst
    return adjusted


def judge(effect: Effect, *, same: tuple[float, float], p: float | None) -> Conclusion:
    """Return the conclusion that an effect allows.

    Args:
        effect: a factor or a difference, with its interval.
        same: (lowest, highest) effect that makes no practical difference.
        p: the effect's p-value, adjusted for the number of comparisons; None if the effect cannot be tested.

    Returns:
        "above" or "below" if the effect lies outside the range ``same`` and is significant; "same" if its whole
        interval lies inside the range; otherwise "unclear". The result is always "unclear" if the effect has no
        interval.
    """
    if effect.low is None or effect.high is None or p is None:
        return "unclear"
    if same[0] <= effect.low and effect.high <= same[1]:
        return "same"
    if p < 1.0 - CONFIDENCE and not same[0] <= effect.value <= same[1]:
        return "above" if effect.value > same[1] else "below"
    return "unclear"


def seeds_needed(effect: Effect, *, half_width: float, n: int, comparisons: int = 1) -> int | None:
    """Return how many seeds per side would shrink an effect's interval to plus or minus ``half_width``.

    The estimate assumes that the values keep their present spread.

    Args:
        effect: the effect with its present interval.
        half_width: the wanted half width of the interval, in the effect's unit.
        n: present number of seeds of the side that has fewer seeds.
        comparisons: number of comparisons to adjust for (Bonferroni, like the first step of Holm's method).

    Returns:
        At least ``n + 1``; `FEWEST_SEEDS` if the effect has no interval; None if even `MOST_SEEDS` are too few.
    """
    if effect.low is None or effect.high is None:
        return FEWEST_SEEDS
    spread = (effect.high - effect.low) / 2.0 / _half_width_per_sd(n)
    enough = (m for m in range(n + 1, MOST_SEEDS + 1) if spread * _half_width_per_sd(m, comparisons) <= half_width)
    return next(enough, None)


def break_even(points: Sequence[tuple[float, float]]) -> list[float]:
    """Return the rates at which a factor is 1, by linear interpolation between points in log(rate) and log(factor).

    Args:
        points: tuples (rate in bit/s, factor at this rate), the lowest rate first.
    """
    edges = [rate for rate, factor in points if factor == 1.0]
    for (left, at_left), (right, at_right) in itertools.pairwise(points):
        above, below = math.log(at_left), math.log(at_right)
        if above * below < 0.0:
            edges.append(left * (right / left) ** (above / (above - below)))
    return sorted(edges)


def _mean_and_variance(values: Sequence[float]) -> tuple[float, float]:
    # The sample variance is exactly 0 for one value and for equal values.
    if min(values) == max(values):
        return values[0], 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def _factor(logarithm: float) -> float:  # at most 1e100, so that the exponential does not overflow
    return math.exp(min(logarithm, math.log(1e100)))


def _half_width_per_sd(n: int, comparisons: int = 1) -> float:  # for two sides of n values, up to a constant factor
    return two_sided_quantile((1.0 - CONFIDENCE) / comparisons, 2 * (n - 1)) / math.sqrt(n)
