"""Look up the columns that the user names on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.core.errors import UsageError
from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS_BY_NAME

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
        from collectives.options import did_you_mean  # imported only here, because it imports pydantic

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
