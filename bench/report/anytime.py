"""A test that stays valid when a user looks at the results after each seed and stops as soon as they are clear.

The values are log ratios, one per seed: the log of the baseline's time minus the log of the candidate's time. With each
seed, the two methods must be measured in random order, so that the values are symmetric around 0 if both methods take
the same time.

The e-value is a likelihood ratio of Student's t statistic, averaged over effects that are normally distributed in
units of the values' standard deviation. If the values are normal and there is no difference, the probability that the
e-value ever reaches 1/alpha is at most alpha, for any number of seeds. `benchmarks/stopping_rule.py` simulates skewed,
heavy-tailed and rounded times.
Source: H. Wang and A. Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
variance", arXiv 2310.03722 (2023).
"""

import math
from collections.abc import Sequence
from typing import Literal

Conclusion = Literal["above", "below", "same", "unclear"]

# 1 / variance of the effects that the e-value averages over. With it, a verdict at alpha = 0.05 takes 4 seeds or more.
_EFFECT_PRECISION = 0.25


def log_e_value(values: Sequence[float]) -> float:
    """Return the natural log of the e-value against the hypothesis "the values are symmetric around 0".

    Args:
        values: log ratios, one per seed.
    """
    n, total, squares = len(values), math.fsum(values), math.fsum(value * value for value in values)
    precision = n + _EFFECT_PRECISION
    explained = total * total / (precision * squares) if squares else 0.0  # below 1, even if all values are equal
    return 0.5 * (math.log(_EFFECT_PRECISION / precision) - n * math.log1p(-explained))


def interval(values: Sequence[float], alpha: float) -> tuple[float, float]:
    """Return the lowest and highest mean log ratio that the e-value does not reject at level ``alpha``.

    The probability that the true mean ever lies outside the interval is at most ``alpha``, even if the interval is
    computed after each seed. The interval is infinite if there are too few values.

    Args:
        values: log ratios, one per seed.
        alpha: probability of error, above 0 and below 1.
    """
    n, total, squares = len(values), math.fsum(values), math.fsum(value * value for value in values)
    precision = n + _EFFECT_PRECISION
    # A shift x is not rejected if (total - n x)^2 < limit * (sum of (value - x)^2): a quadratic inequality in x.
    limit = precision * -math.expm1(math.log(alpha * alpha * _EFFECT_PRECISION / precision) / n) if n else 0.0
    if limit >= n:
        return -math.inf, math.inf
    mean = total / n
    spread = max(squares - total * mean, 0.0)
    half = math.sqrt(limit * spread / (n * (n - limit)))
    return mean - half, mean + half


def judge_log_ratios(values: Sequence[float], *, alpha: float, same: float, shared_error: float = 0.0) -> Conclusion:
    """Return the conclusion that log ratios allow; it is valid after any number of seeds.

    Args:
        values: log ratios, one per seed.
        alpha: probability of a wrong conclusion.
        same: mean log ratios from ``-same`` to ``same`` make no practical difference.
        shared_error: largest error that all values have in common, for example the error of the measured step times
            from which all of them are computed. The interval is widened by this error on both sides.

    Returns:
        "same" if the whole interval lies between ``-same`` and ``same``; "above" or "below" if the interval does not
        contain 0 and the mean lies outside this range; otherwise "unclear".
    """
    low, high = (bound + side * shared_error for bound, side in zip(interval(values, alpha), (-1, 1), strict=True))
    if -same <= low and high <= same:
        return "same"
    if low <= 0.0 <= high or abs(low + high) <= 2.0 * same:
        return "unclear"
    return "above" if low > 0.0 else "below"
