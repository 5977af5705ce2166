"""Columns as the user names them on the command line."""

from __future__ import annotations

from bench.core.errors import UsageError
from bench.core.schema import METRICS_BY_NAME, Column


def find_column(name: str) -> Column:
    """The column of metrics.csv with this name.

    Raises:
        UsageError: there is none (the message names the nearest one).
    """
    if name not in METRICS_BY_NAME:
        from collectives.options import did_you_mean  # brings pydantic along: only where it is needed

        raise UsageError(
            f"there is no column '{name}'{did_you_mean(name, METRICS_BY_NAME)}; results/README.md explains every column"
        )
    return METRICS_BY_NAME[name]


def find_metric(name: str) -> Column:
    """The column with this name, if more or less of it can be better.

    Raises:
        UsageError: there is no such column, or it has no direction.
    """
    column = find_column(name)
    if not column.better:
        raise UsageError(f"{name} cannot be compared: neither more nor less of it is better; try samples_per_s")
    return column
