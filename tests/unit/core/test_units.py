"""Units: numbers as people write and read them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.core.errors import UsageError
from bench.core.units import format_bytes, format_rate, format_seconds, parse_duration, parse_rate, parse_size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1_234_567, "1.23 MB"),
        (44_700_000, "44.7 MB"),
        (999_700, "1000 kB"),
        (2.5e12, "2500 GB"),
        (math.nan, "-"),
        (math.inf, "-"),
    ],
)
def test_bytes(num_bytes: float, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1.5e-6, "1.5 us"),
        (0.0123, "12.3 ms"),
        (0.9997, "1000 ms"),
        (1.0, "1 s"),
        (119.0, "119 s"),
        (200.0, "3 min 20 s"),
        (math.nan, "-"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (1e8, "100 Mbit/s"),
        (2.5e9, "2.5 Gbit/s"),
        (800e3, "800 kbit/s"),
        (12, "12 bit/s"),
        (1.234e12, "1234 Gbit/s"),
        (math.nan, "-"),
    ],
)
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100mbit", 1e8),
        ("1gbit", 1e9),
        ("800 kbit", 8e5),
        ("5bit", 5),
        ("1.5Gbit", 1.5e9),
        ("10Mbit/s", 1e7),
    ],
)
def test_reading_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10MB", 10_000_000),
        ("1MiB", 1 << 20),
        ("512", 512),
        ("1.5 kB", 1500),
        ("2GiB", 2 << 30),
        ("7b", 7),
        (".5kB", 500),
    ],
)
def test_reading_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("20ms", 0.02), ("1.5s", 1.5), ("10m", 600), ("50us", 5e-5), ("2h", 7200), ("3d", 259_200)]
)
def test_reading_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "100", "-1mbit", "0mbit", "1mbyte", "1..5mbit", ".", "1e999mbit"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a bandwidth; write it like 100mbit"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "bits", "of_bytes"),
    [
        ("12.5MBps", "12.5mbit", "100mbit"),
        ("100mbps", "100mbit", "800mbit"),
        ("1 Gbps", "1gbit", "8gbit"),
        ("800Kbps", "800kbit", "6400kbit"),
        ("100Bps", "100bit", "800bit"),
        ("5 bps", "5bit", "40bit"),
        ("1MiBps", "1.048576mbit", "8.388608mbit"),
    ],
)
def test_a_rate_that_may_be_bits_or_bytes_is_refused_with_both_readings(text: str, bits: str, of_bytes: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_rate(text)
    assert str(error.value) == (
        f"'{text}' may mean bits or bytes per second; write {bits} for bits, or {of_bytes} for bytes"
    )


@pytest.mark.parametrize("text", ["", "big", "-5kB", "1.2.3MB", "1TB", "5i", "1e999"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size; write it like 10kB"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "5", "soon", "-1s", "1..5s", "3w", "1e+06s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a duration; write it like 20ms"):
        parse_duration(text)


@given(st.floats(min_value=1, max_value=1e12))
def test_three_digits_of_a_size_survive(num_bytes: float) -> None:
    text = format_bytes(num_bytes)
    assert parse_size(text) == pytest.approx(num_bytes, rel=0.006, abs=0.5)
