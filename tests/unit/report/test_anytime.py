"""The anytime-valid rule: its e-value, its interval, and how often it errs."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate

from bench.report.anytime import interval, judge_log_ratios, log_e_value


def integrated_e_value(values: list[float], precision: float = 0.25) -> float:
    """Integrate the likelihood ratio over effects and scales, as its definition says.

    With s = 1 / standard deviation and d = effect in standard deviations, the likelihood of the values is proportional
    to s^n exp(-s^2 V / 2 + s d S - n d^2 / 2), the prior of s to 1/s, and d is normal with variance 1/precision.
    """
    n, total, squares = len(values), math.fsum(values), math.fsum(value * value for value in values)
    total /= math.sqrt(squares)  # s is measured in units of 1 / sqrt(V)

    def joint(effect: float, scale: float) -> float:
        exponent = -scale * scale / 2 + scale * effect * total - (n + precision) * effect * effect / 2
        return scale ** (n - 1) * math.exp(exponent) * math.sqrt(precision / (2 * math.pi))

    def bound(side: int) -> Callable[[float], float]:  # beyond them, the integrand is below 1e-30 of its peak
        return lambda scale: scale * total / (n + precision) + side * 12 / math.sqrt(n + precision)

    numerator = integrate.dblquad(joint, 0, 80, bound(-1), bound(+1), epsabs=1e-13, epsrel=1e-12)[0]
    return numerator / (2 ** (n / 2 - 1) * math.gamma(n / 2))


@pytest.mark.parametrize("values", [[0.3, -0.1], [0.5, 0.7, 0.6, 0.65], [0.01, -0.02, 0.05, -0.3, 0.2, 0.1]])
def test_the_e_value_is_the_average_likelihood_ratio(values: list[float]) -> None:
    assert math.exp(log_e_value(values)) == pytest.approx(integrated_e_value(values), rel=1e-9)


@pytest.mark.parametrize("alpha", [0.05, 0.0125])
def test_the_interval_holds_the_shifts_that_are_not_rejected(alpha: float) -> None:
    values = list(np.random.default_rng(3).normal(0.4, 0.3, 9))
    low, high = interval(values, alpha)
    for bound in (low, high):
        assert log_e_value([value - bound for value in values]) == pytest.approx(-math.log(alpha), rel=1e-9)
    assert log_e_value([value - (low + high) / 2 for value in values]) < 0


def test_few_seeds_give_no_interval() -> None:
    assert [interval([0.7] * n, 0.05)[1] < math.inf for n in range(6)] == [False, False, False, False, True, True]


def test_values_without_spread_have_a_bare_interval() -> None:
    assert interval([0.25] * 4, 0.05) == (0.25, 0.25)
    assert log_e_value([0.0] * 4) < 0


def test_a_verdict_needs_an_interval_on_one_side_of_zero_or_inside_the_range_of_equal_times() -> None:
    clear = [0.5, 0.52, 0.48, 0.5, 0.51]
    assert judge_log_ratios(clear, alpha=0.05, same=0.03) == "above"
    assert judge_log_ratios([-value for value in clear], alpha=0.05, same=0.03) == "below"
    assert judge_log_ratios([value - 0.5 for value in clear], alpha=0.05, same=0.2) == "same"
    assert judge_log_ratios(clear, alpha=0.05, same=0.03, shared_error=0.6) == "unclear"
    assert judge_log_ratios([0.02] * 5, alpha=0.05, same=0.03, shared_error=0.015) == "unclear"


def test_a_look_after_each_seed_errs_rarely() -> None:
    draws = np.random.default_rng(1).standard_t(3, (500, 12))
    errs = [any(log_e_value(row[:n].tolist()) >= math.log(20) for n in range(2, 13)) for row in draws]
    assert np.mean(errs) < 0.05
