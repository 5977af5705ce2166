"""Find columns of metrics.csv by the names that users give, and format their values for people."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.core.errors import UsageError
from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS_BY_NAME
from bench.core.units import format_bytes, format_rate, format_seconds
from bench.report.statistics import Effect
from collectives.options import did_you_mean

NOTHING = "-"
_SHA_DIGITS = 10  # enough to distinguish commits

BYTES_TO_TARGET = Column(
    "quality",
    "bytes_to_target",
    float,
    "bytes of gradients and optimizer state that a rank sent until the target; computed, not in any file",
    unit="bytes",
    better="lower",
)

# The columns of metrics.csv and those computed from them.
COLUMNS_BY_NAME: Mapping[str, Column] = {**METRICS_BY_NAME, BYTES_TO_TARGET.name: BYTES_TO_TARGET}

ALL = "all"  # stands for every column of a comparison
STEP = ("forward_backward_s", "encode_s", "exchange_s", "exposed_s")  # the parts of a step


def find_column(name: str) -> Column:
    """Return the column of metrics.csv with this name.

    Raises:
        UsageError: there is none; the message names the most similar one.
    """
    if name not in METRICS_BY_NAME:
        raise UsageError(
            f"there is no column '{name}'{did_you_mean(name, METRICS_BY_NAME)}; docs/columns.md explains every column"
        )
    return METRICS_BY_NAME[name]


def find_metric(name: str) -> Column:
    """Return the column with this name, if a higher or a lower value of it is better.

    Raises:
        UsageError: there is no such column, or neither direction is better.
    """
    column = COLUMNS_BY_NAME.get(name) or find_column(name)
    if not column.better:
        raise UsageError(f"{name} cannot be compared: neither more nor less of it is better; try samples_per_s")
    return column


def find_numbers(names: Sequence[str]) -> list[str]:
    """Return the names of columns with a mean; ``step`` is expanded to the parts of a step.

    Raises:
        UsageError: there is no such column, or it holds no numbers.
    """
    found: list[str] = []
    for name in names:
        if name == "step":
            found += STEP
        elif name == BYTES_TO_TARGET.name or find_column(name).type in (int, float):
            found.append(name)
        else:
            raise UsageError(f"{name} holds no numbers, so it has no mean to show; --by {name} groups by it")
    return found


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
    has_no_unit = text == format_number(bound) and mean_text.replace(".", "", 1).lstrip("-").isdecimal()
    return f"{bound:.{len(mean_text.partition('.')[2])}f}" if has_no_unit else text


def format_interval(text: str, low: str | None, high: str | None) -> str:
    """Return ``1.31x [1.22, 1.40]``, or the text alone if there is no interval."""
    return text if low is None or high is None else f"{text} [{low}, {high}]"


def format_effect(effect: Effect | None, form: Callable[[float], str], unit: str = "") -> str:
    """Format an effect with its interval, if it has one; the unit follows only the effect."""
    if effect is None:
        return NOTHING
    bounds = (None if bound is None else form(bound) for bound in (effect.low, effect.high))
    return format_interval(form(effect.value) + unit, *bounds)


def format_factor(factor: float) -> str:
    """Format a factor with three digits: ``1.31``, ``12.3``, ``482``."""
    return f"{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}"


def format_points(share: float) -> str:
    """Format a difference of shares in percentage points, with its sign: ``-0.004`` -> ``-0.4``."""
    points = f"{share * 100:+.1f}"
    return "0.0" if points in ("+0.0", "-0.0") else points
