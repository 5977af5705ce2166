"""Find columns of metrics.csv by the names that users give, and format their values for people."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.core.columns import Column
from bench.core.errors import UsageError
from bench.core.schema import METRICS_BY_NAME
from bench.core.units import format_bytes, format_rate, format_seconds
from bench.report.statistics import Effect
from collectives.options import did_you_mean

NOTHING = "-"
_SHA_DIGITS = 10  # enough to distinguish commits

BYTES_TO_TARGET = Column(
    "quality",
    "bytes_to_target",
    float,
    "bytes of gradients and optimizer state that a rank sent until its run reached the target; not in any file",
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
        UsageError: no column has this name; the message suggests the most similar one.
    """
    if name not in METRICS_BY_NAME:
        raise UsageError(
            f"there is no column '{name}'{did_you_mean(name, METRICS_BY_NAME)}; docs/columns.md explains every column"
        )
    return METRICS_BY_NAME[name]


def find_metric(name: str) -> Column:
    """Return the column with this name, if it can be compared: either higher or lower values must be better.

    Raises:
        UsageError: no column has this name, or neither higher nor lower values are better.
    """
    column = COLUMNS_BY_NAME.get(name) or find_column(name)
    if not column.better:
        raise UsageError(
            f"{name} cannot be compared: neither higher nor lower values are better; choose "
            "another column, such as samples_per_s"
        )
    return column


def find_numbers(names: Sequence[str]) -> list[str]:
    """Return the names of the given columns, after checking that each holds numbers, so that it has a mean.

    Args:
        names: names of columns; ``step`` stands for the columns `STEP`, the parts of a training step's time.

    Raises:
        UsageError: there is no column with one of these names, or it holds no numbers.
    """
    found: list[str] = []
    for name in names:
        if name == "step":
            found += STEP
        elif name == BYTES_TO_TARGET.name or find_column(name).type in (int, float):
            found.append(name)
        else:
            raise UsageError(f"{name} holds no numbers, so it has no mean; to group runs by it, use --by {name}")
    return found


_BY_UNIT = {"s": format_seconds, "bytes": format_bytes, "bit/s": format_rate}


def format_value(column: str, value: Any) -> str:
    """Return a value of the named column as text; ``-`` if it is None or NaN.

    Times, bytes and rates have a scaled unit, such as ``12.3 ms``.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        known = COLUMNS_BY_NAME.get(column)
        return _BY_UNIT.get(known.unit if known else "", format_number)(value)
    return str(value)[:_SHA_DIGITS] if column == "git_sha" else str(value)


def format_number(value: float) -> str:
    """Return a number with four significant digits, or as an integer from 1000 on: ``15770``, ``12.34``, ``0.05``."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_bound(column: str, bound: float, mean_text: str) -> str:
    """Return the bound of an interval as text.

    If bound and mean are plain numbers without a unit, the bound has as many decimals as the mean.

    Args:
        column: the column's name.
        bound: the bound.
        mean_text: the mean of the interval as text.
    """
    text = format_value(column, bound)
    has_no_unit = text == format_number(bound) and mean_text.replace(".", "", 1).lstrip("-").isdecimal()
    return f"{bound:.{len(mean_text.partition('.')[2])}f}" if has_no_unit else text


def format_interval(text: str, low: str | None, high: str | None) -> str:
    """Return a text with its interval, such as ``1.31x [1.22, 1.40]``; the text alone if a bound is None."""
    return text if low is None or high is None else f"{text} [{low}, {high}]"


def format_effect(effect: Effect | None, form: Callable[[float], str], unit: str = "") -> str:
    """Return an effect with its interval, such as ``1.31x [1.22, 1.40]``; ``-`` if the effect is None.

    Args:
        effect: the effect; without an interval, only its value is written.
        form: formats the effect's value and each bound.
        unit: text to write after the value, but not after the bounds.
    """
    if effect is None:
        return NOTHING
    bounds = (None if bound is None else form(bound) for bound in (effect.low, effect.high))
    return format_interval(form(effect.value) + unit, *bounds)


def format_factor(factor: float) -> str:
    """Return a factor with two decimals below 10, one below 100 and none above: ``1.31``, ``12.3``, ``482``."""
    return f"{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}"


def format_points(share: float) -> str:
    """Return a difference of shares in percentage points, with its sign and one decimal: ``-0.4`` for -0.004."""
    points = f"{share * 100:+.1f}"
    return "0.0" if points in ("+0.0", "-0.0") else points
