from __future__ import annotations

from typing import Any

import pytest

from bench.report.columns import (
    format_bound,
    format_factor,
    format_interval,
    format_number,
    format_points,
    format_value,
)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("step_time_s", 0.0123, "12.3 ms"),
        ("payload_bytes_per_step", 1.5e6, "1.5 MB"),
        ("uplink_bps", 1e8, "100 Mbit/s"),
        ("lr", 0.05, "0.05"),
        ("world_size", 4, "4"),
        ("augment", True, "true"),
        ("compressor", "topk", "topk"),
        ("latency_s", None, "-"),
        ("samples_per_s", float("nan"), "-"),
    ],
)
def test_a_value_is_written_by_its_columns_unit(column: str, value: Any, text: str) -> None:
    assert format_value(column, value) == text


@pytest.mark.parametrize(("value", "text"), [(15773.4, "15773"), (12.345, "12.35"), (0.05, "0.05"), (0, "0")])
def test_numbers_have_four_digits(value: float, text: str) -> None:
    assert format_number(value) == text


def test_a_bound_has_the_decimals_of_its_mean() -> None:
    assert format_bound("samples_per_s", 734.79, "1533") == "735"
    assert format_bound("samples_per_s", 9.5, "12.35") == "9.50"
    assert format_bound("step_time_s", 0.0009, "1.1 ms") == "900 us"


def test_factors_intervals_and_points() -> None:
    assert [format_factor(f) for f in (1.306, 12.34, 481.7)] == ["1.31", "12.3", "482"]
    assert format_interval("1.31x", "1.22", "1.40") == "1.31x [1.22, 1.40]"
    assert format_interval("1.31x", None, None) == "1.31x"
    assert [format_points(share) for share in (-0.004, 0.0123, 0.0, -0.0001)] == ["-0.4", "+1.2", "0.0", "0.0"]
