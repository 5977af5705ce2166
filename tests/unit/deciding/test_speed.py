"""The rate up to which a predicted method is faster."""

import pytest

from bench.deciding.speed import ERROR, HIGHEST_BPS, faster_up_to


def test_the_edge_is_where_the_factor_falls_to_the_error_of_predictions() -> None:
    assert faster_up_to(lambda rate: 1e8 * (1 + ERROR) / rate, 1e6) == pytest.approx(1e8)
    assert faster_up_to(lambda rate: 1.0, 1e6) is None
    assert faster_up_to(lambda rate: 2.0, 1e6) == HIGHEST_BPS
    # Faster, slower, faster, slower: the highest edge counts. The highest rate itself is possible despite rounding.
    assert faster_up_to(lambda rate: 2.0 if rate < 1e7 or 1e8 < rate < 1e9 else 0.5, 1e6) == pytest.approx(1e9, rel=0.3)
    rates: list[float] = []
    faster_up_to(lambda rate: rates.append(rate) or 1.0, 764_010_000.0)
    assert max(rates) == HIGHEST_BPS
