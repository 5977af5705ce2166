"""Format values for people by the unit of their column; files contain base units instead."""

from __future__ import annotations

import math
from typing import Any

from bench.core.units import format_bytes, format_rate, format_seconds
from bench.report.columns import COLUMNS_BY_NAME

NOTHING = "-"
_SHA_DIGITS = 10  # enough to distinguish commits

_BY_UNIT = {"s": format_seconds, "bytes": format_bytes, "bit/s": format_rate}


def format_value(column: str, value: Any) -> str:
    """Format a value of the named column, with a scaled unit for times, bytes and rates; ``-`` if there is no value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        known = COLUMNS_BY_NAME.get(column)
        return _BY_UNIT.get(known.unit if known else "", format_number)(value)
    return str(value)[:_SHA_DIGITS] if column == "git_sha" else str(value)


def format_number(value: float) -> str:
    """Format with four significant digits, or as an integer from 1000 on: ``15770``, ``12.34``, ``0.05``."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_bound(column: str, bound: float, mean_text: str) -> str:
    """Format a bound of an interval, with as many decimals as its mean if both have the same unit."""
    text = format_value(column, bound)
    decimals = len(mean_text.partition(".")[2])
    return f"{bound:.{decimals}f}" if text == format_number(bound) and _is_number(mean_text) else text


def format_interval(text: str, low: str | None, high: str | None) -> str:
    """Return ``1.31x [1.22, 1.40]``, or the text alone if there is no interval."""
    return text if low is None or high is None else f"{text} [{low}, {high}]"


def format_factor(factor: float) -> str:
    """Format a factor with three digits: ``1.31``, ``12.3``, ``482``."""
    return f"{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}"


def format_points(share: float) -> str:
    """Format a difference of shares in percentage points, with its sign: ``-0.004`` -> ``-0.4``."""
    points = f"{share * 100:+.1f}"
    return "0.0" if points in ("+0.0", "-0.0") else points


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).lstrip("-").isdecimal()
