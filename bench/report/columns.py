"""Columns as the user names them on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.core.errors import UsageError
from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS_BY_NAME

BYTES_TO_TARGET = Column(
    "quality",
    "bytes_to_target",
    float,
    "bytes of gradients and optimizer state that a rank sent until the target; derived, in no file",
    unit="bytes",
    better="lower",
)

COLUMNS_BY_NAME: Mapping[str, Column] = {**METRICS_BY_NAME, BYTES_TO_TARGET.name: BYTES_TO_TARGET}
"""What can be shown: the columns of metrics.csv and what follows from them."""

ALL = "all"
"""Stands for every column that a comparison has."""

STEP = ("forward_backward_s", "encode_s", "exchange_s", "exposed_s")
"""Where a step goes."""


def find_column(name: str) -> Column:
    """The column of metrics.csv with this name.

    Raises:
        UsageError: there is none (the message names the nearest one).
    """
    if name not in METRICS_BY_NAME:
        from collectives.options import did_you_mean  # brings pydantic along: only where it is needed

        raise UsageError(
            f"there is no column '{name}'{did_you_mean(name, METRICS_BY_NAME)}; docs/columns.md explains every column"
        )
    return METRICS_BY_NAME[name]


def find_metric(name: str) -> Column:
    """The column with this name, if more or less of it can be better.

    Raises:
        UsageError: there is no such column, or it has no direction.
    """
    column = COLUMNS_BY_NAME.get(name) or find_column(name)
    if not column.better:
        raise UsageError(f"{name} cannot be compared: neither more nor less of it is better; try samples_per_s")
    return column


def find_numbers(names: Sequence[str]) -> list[str]:
    """The columns of which a mean can be shown; ``step`` stands for where a step goes.

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
