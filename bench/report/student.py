"""Student's t distribution without scipy, whose import would take longer than the rest of `bench compare`.

Source: W. J. Lentz, "Generating Bessel functions in Mie scattering calculations using continued fractions", Applied
Optics 15 (1976), for the continued fraction of the incomplete beta function (DLMF 8.17.22). Tests compare both
functions with scipy.
"""

from __future__ import annotations

import functools
import math
import statistics

_TINY = 1e-300  # in place of a zero denominator
_EXACT = 1e-15


def two_sided_p(t: float, degrees: float) -> float:
    """Return the probability that a value of the distribution is at least as far from zero as t."""
    return _incomplete_beta(degrees / 2.0, 0.5, degrees / (degrees + t * t), t * t / (degrees + t * t))


@functools.lru_cache(maxsize=4096)
def two_sided_quantile(p: float, degrees: float) -> float:
    """Return the t > 0 with ``two_sided_p(t) == p``, for 0 < p <= 0.5 and at least one degree of freedom."""
    # Newton's method starts at the normal distribution's quantile. It is left of the root, where the probability is
    # convex and falling, so no step passes the root.
    t = statistics.NormalDist().inv_cdf(1.0 - p / 2.0)
    log_norm = math.lgamma((degrees + 1.0) / 2.0) - math.lgamma(degrees / 2.0) - 0.5 * math.log(degrees * math.pi)
    while True:
        density = math.exp(log_norm - (degrees + 1.0) / 2.0 * math.log1p(t * t / degrees))
        step = (two_sided_p(t, degrees) - p) / (2.0 * density)
        t += step
        if step <= 1e-13 * t:
            return t


def _incomplete_beta(a: float, b: float, x: float, rest: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b); ``rest`` is 1 - x without rounding error."""
    if 0.0 in (x, rest):
        return x
    if x > (a + 1.0) / (a + b + 2.0):  # the fraction of the other end converges faster
        return 1.0 - _incomplete_beta(b, a, rest, x)
    log_front = a * math.log(x) + b * math.log(rest) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    return math.exp(log_front) / a / _fraction(a, b, x)


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction 1 + d1 / (1 + d2 / (1 + ...)) by Lentz's method."""
    value, c, d = 1.0, 1.0, 0.0
    for m in range(1, 10_000):
        half = m // 2
        if m % 2:
            term = -(a + half) * (a + b + half) * x / ((a + 2 * half) * (a + 2 * half + 1.0))
        else:
            term = half * (b - half) * x / ((a + 2 * half - 1.0) * (a + 2 * half))
        d = 1.0 / (1.0 + term * d or _TINY)
        c = 1.0 + term / c or _TINY
        value *= c * d
        if abs(c * d - 1.0) < _EXACT:
            break
    return value
