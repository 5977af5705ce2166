from __future__ import annotations

import pytest
from scipy import special

from bench.report.statistics import two_sided_p, two_sided_quantile

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
