"""The Column class, which describes one column of a CSV file, and helpers to declare columns.

An option of a command becomes a column through its own declaration (`bench.core.config`); this package declares all
other columns. The CSV headings, `docs/columns.md`, `bench compare` and regression gates use these declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from bench.core.config.configuration import Configuration

Direction = Literal["", "higher", "lower"]


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """One column of a CSV file. Each column is declared once and equals only itself.

    Attributes:
        group: heading under which the documentation lists it.
        name: the column's heading, which is also the JSON key and the name of the dataclass field.
        type: Python type of a filled cell; an empty cell means "not measured" or "does not apply".
        meaning: explanation in one line.
        unit: unit of a number; empty for texts and plain counts.
        better: the direction that is an improvement; empty if neither is.
        deterministic: two runs with the same configuration and seed on one machine have the same value.
        absent: value to assume for rows of files without this column; in columns that describe how or where a run was
            made, also for rows whose cell is empty.
    """

    group: str
    name: str
    type: type
    meaning: str
    unit: str = ""
    better: Direction = ""
    deterministic: bool = True
    absent: Any = None


identity = partial(Column, "identity")


def seconds(group: str, name: str, meaning: str) -> Column:
    """Return a column of a measured time."""
    return Column(group, name, float, meaning, unit="s", better="lower", deterministic=False)


def bytes_per_s(group: str, name: str, meaning: str) -> Column:
    """Return a column of a measured rate in bytes per second."""
    return Column(group, name, float, meaning, unit="bytes/s", better="higher", deterministic=False)


def num_bytes(group: str, name: str, meaning: str, *, deterministic: bool = True, absent: Any = None) -> Column:
    """Return a column of a number of bytes sent, fewer of which are better."""
    return Column(group, name, float, meaning, "bytes", "lower", deterministic, absent)


def declared_columns(configuration: type[Configuration]) -> Iterator[Column]:
    """Yield a column for each recorded option of a configuration."""
    for option in configuration.options():
        recorded = option.recorded
        if recorded.column:
            yield identity(option.name, option.cell_type, option.meaning, unit=recorded.unit, absent=recorded.absent)
