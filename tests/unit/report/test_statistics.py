"""Statistics over seeds, against scipy and against numbers computed by hand."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import special, stats

from bench.report.statistics import (
    Effect,
    break_even,
    difference,
    estimate,
    holm,
    improvement,
    judge,
    seeds_needed,
    two_sided_p,
    two_sided_quantile,
)

SPEED_UP_SAME = (1 / 1.05, 1.05)


def test_the_interval_of_a_mean_by_hand() -> None:
    known = estimate([1.0, 2.0, 3.0])
    assert known is not None
    assert (known.mean, known.sd, known.n) == (2.0, 1.0, 3)
    # Student's table: t(0.975, 2 degrees) = 4.3027
    assert known.low == pytest.approx(2.0 - 4.302653 / math.sqrt(3), abs=1e-6)
    assert known.high == pytest.approx(2.0 + 4.302653 / math.sqrt(3), abs=1e-6)


def test_one_value_has_a_mean_but_no_interval_and_none_has_nothing() -> None:
    known = estimate([5.0])
    assert known is not None
    assert (known.mean, known.sd, known.low, known.high, known.n) == (5.0, None, None, None, 1)
    assert estimate([]) is None


def test_the_difference_agrees_with_scipys_welch_test() -> None:
    baseline, candidate = [97.1, 97.9, 98.2, 97.6], [96.4, 97.7, 96.9]
    effect = difference(baseline, candidate)
    reference = stats.ttest_ind(candidate, baseline, equal_var=False)
    interval = reference.confidence_interval(0.95)
    assert effect is not None
    assert (effect.low, effect.high) == pytest.approx((interval.low, interval.high), rel=1e-9)
    assert effect.p == pytest.approx(reference.pvalue, rel=1e-9)


def test_the_t_interval_covers_what_it_promises_at_three_seeds() -> None:
    source = random.Random(0)
    covered = 0
    for _ in range(2000):
        known = estimate([source.gauss(10.0, 2.0) for _ in range(3)])
        assert known is not None
        assert known.low is not None
        assert known.high is not None
        covered += known.low <= 10.0 <= known.high
    assert 0.93 <= covered / 2000 <= 0.97


def test_values_that_repeat_exactly_differ_for_certain() -> None:
    assert difference([5.0, 5.0], [7.0, 7.0], counted=True) == Effect(value=2.0, low=2.0, high=2.0, p=0.0)
    assert difference([5.0, 5.0], [5.0, 5.0]) == Effect(value=0.0, low=0.0, high=0.0, p=1.0)


def test_improvement_is_above_one_when_better_whichever_way_the_metric_points() -> None:
    faster = improvement([100.0, 100.0], [200.0, 200.0], higher_is_better=True)
    shorter = improvement([2.0, 2.0], [1.0, 1.0], higher_is_better=False)
    assert faster is not None
    assert shorter is not None
    assert faster.value == pytest.approx(2.0)
    assert shorter.value == pytest.approx(2.0)


def test_improvement_agrees_with_welch_on_the_logarithms_and_inverts_exactly() -> None:
    baseline, candidate = [1204.0, 1190.0, 1221.0], [1577.0, 1544.0, 1610.0]
    effect = improvement(baseline, candidate, higher_is_better=True)
    back = improvement(candidate, baseline, higher_is_better=True)
    logs = stats.ttest_ind([math.log(x) for x in candidate], [math.log(x) for x in baseline], equal_var=False)
    interval = logs.confidence_interval(0.95)
    assert effect is not None
    assert back is not None
    assert (effect.low, effect.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert effect.value * back.value == pytest.approx(1.0)
    assert effect.low is not None
    assert back.high is not None
    assert effect.low * back.high == pytest.approx(1.0)


@pytest.mark.parametrize(("baseline", "candidate"), [([], [1.0]), ([1.0], []), ([0.0], [1.0]), ([1.0], [-1.0])])
def test_no_improvement_without_positive_values_on_both_sides(baseline: list[float], candidate: list[float]) -> None:
    assert improvement(baseline, candidate, higher_is_better=True) is None


def test_holm_by_hand() -> None:
    # Sorted 0.01 x 3, 0.02 x 2, 0.04 x 1, made monotonic; None does not count.
    assert holm([0.04, None, 0.01, 0.02]) == pytest.approx([0.04, None, 0.03, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        (Effect(value=1.31, low=1.22, high=1.40, p=0.001), "above"),
        (Effect(value=0.80, low=0.75, high=0.85, p=0.001), "below"),
        (Effect(value=1.01, low=0.98, high=1.04, p=0.3), "same"),
        (Effect(value=1.02, low=1.01, high=1.03, p=0.001), "same"),  # real, but without practical importance
        (Effect(value=1.30, low=0.90, high=1.88, p=0.10), "unclear"),  # large, but may be noise
        (Effect(value=1.04, low=1.01, high=1.08, p=0.01), "unclear"),  # real, perhaps of practical importance
        (Effect(value=1.00, low=0.91, high=1.10, p=0.9), "unclear"),
    ],
)
def test_the_verdict_needs_size_and_certainty(effect: Effect, said: str) -> None:
    assert judge(effect, same=SPEED_UP_SAME, p=effect.p) == said


def test_one_seed_is_never_significant() -> None:
    effect = improvement([100.0], [500.0, 510.0, 490.0], higher_is_better=True)
    assert effect is not None
    assert effect.value == pytest.approx(5.0, rel=0.01)
    assert judge(effect, same=SPEED_UP_SAME, p=effect.p) == "unclear"


def test_many_comparisons_ask_for_more_certainty() -> None:
    effect = Effect(value=1.31, low=1.01, high=1.70, p=0.04)
    assert judge(effect, same=SPEED_UP_SAME, p=0.04) == "above"
    assert judge(effect, same=SPEED_UP_SAME, p=holm([0.04, 0.5, 0.6])[0]) == "unclear"


def test_seeds_needed_for_a_narrower_interval() -> None:
    # n per side: half width = t(2n - 2) s sqrt(2 / n). t / sqrt(n) at n = 3 is 2.776 / 1.732 = 1.603; half of it is
    # 0.801, which 2.179 / 2.646 = 0.824 at n = 7 does not reach, and 2.145 / 2.828 = 0.758 at n = 8 does.
    assert seeds_needed(Effect(value=1.0, low=0.9, high=1.1, p=0.9), half_width=0.05, n=3) == 8
    assert seeds_needed(Effect(value=1.0, low=0.99, high=1.01, p=0.9), half_width=0.05, n=3) == 4
    assert seeds_needed(Effect(value=1.0, low=None, high=None, p=None), half_width=0.05, n=1) == 3
    assert seeds_needed(Effect(value=1.0, low=0.1, high=1.9, p=0.9), half_width=0.01, n=3) is None
    # Half of 1.57 is 0.49 times 1.603. Among four, t(0.0125) is 3.038 / 2.449 = 1.240 at n = 6, above 0.6 / 0.49, and
    # 2.934 / 2.646 = 1.109 at n = 7.
    large = Effect(value=2.1, low=1.46, high=3.03, p=0.014)
    assert [seeds_needed(large, half_width=0.6, n=3, comparisons=k) for k in (1, 4)] == [4, 7]


def test_an_interval_that_no_float_holds_ends_at_a_finite_factor() -> None:
    effect = improvement([1e-99, 1e99], [1.0, 2.0], higher_is_better=True)
    assert effect is not None
    assert effect.high == pytest.approx(1e100)
    assert effect.low == 0.0


def test_values_without_spread_say_as_much_as_their_order() -> None:
    few = improvement([1.0] * 3, [2.0] * 3, higher_is_better=True)
    many = improvement([1.0] * 4, [2.0] * 4, higher_is_better=True)
    pairs = improvement([1.0, 3.0] * 3, [2.0, 6.0] * 3, higher_is_better=True, paired=True)
    counted = improvement([1.0] * 2, [2.0] * 2, higher_is_better=True, counted=True)
    assert few == Effect(value=2.0, low=None, high=None, p=0.1)
    assert many == Effect(value=2.0, low=2.0, high=2.0, p=pytest.approx(2 / 70))
    assert pairs is not None
    assert pairs.p == 2**-5  # although logarithms are rounded
    assert counted == Effect(value=2.0, low=2.0, high=2.0, p=0.0)
    assert difference([0.97] * 2, [0.97] * 2) == Effect(value=0.0, low=0.0, high=0.0, p=1.0)


def test_the_order_of_all_values_is_as_likely_as_counting_says() -> None:
    everyone = list(itertools.permutations(range(6)))
    apart = sum(max(order[:3]) < min(order[3:]) or min(order[:3]) > max(order[3:]) for order in everyone)
    effect = difference([1.0] * 3, [2.0] * 3)
    assert effect is not None
    assert effect.p == pytest.approx(apart / len(everyone))


DEGREES = [1.0, 1.5, 2.0, 3.0, 4.0, 7.7, 30.0, 300.0, 10_000.0]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.1, 1.0, 2.5, 4.3, 12.0, 60.0])
def test_the_probability_is_scipys(t: float, degrees: float) -> None:
    assert two_sided_p(t, degrees) == pytest.approx(2.0 * float(special.stdtr(degrees, -t)), rel=1e-9, abs=1e-300)
    assert two_sided_p(-t, degrees) == two_sided_p(t, degrees)


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("p", [0.001, 0.05, 0.5])
def test_the_quantile_is_scipys(p: float, degrees: float) -> None:
    assert two_sided_quantile(p, degrees) == pytest.approx(-float(special.stdtrit(degrees, p / 2.0)), rel=1e-9)


def test_the_printed_table() -> None:
    assert two_sided_quantile(0.05, 1) == pytest.approx(12.706, abs=5e-4)
    assert two_sided_quantile(0.05, 4) == pytest.approx(2.776, abs=5e-4)


def test_break_even_lies_on_a_straight_line_between_logarithms() -> None:
    # 4x at 10 Mbit/s, 1/2 at 1000 Mbit/s: logarithms 2 and -1, so two thirds of the way, which is 10 x 100^(2/3).
    assert break_even([(1e7, 4.0), (1e9, 0.5)]) == [pytest.approx(1e7 * 100 ** (2 / 3))]


@pytest.mark.parametrize(
    ("points", "crossings"),
    [([(1e7, 2.0), (1e8, 1.5)], []), ([(1e7, 2.0), (1e8, 1.0), (1e9, 0.5)], [1e8]), ([(1e7, 1.0), (1e8, 3.0)], [1e7])],
)
def test_break_even_points_are_only_those_measured_or_enclosed(
    points: list[tuple[float, float]], crossings: list[float]
) -> None:
    assert break_even(points) == crossings
