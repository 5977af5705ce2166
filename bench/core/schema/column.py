"""Column: what one column of a CSV file holds; what was asked for is declared by its option, the rest in this package.

Headings, `docs/columns.md`, `bench compare` and regression gates read their columns from here.
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
    """One column of a CSV file; each is declared once, so that it equals only itself.

    Attributes:
        group: heading under which the documentation lists it.
        name: the column's heading; the same word is the JSON key and the dataclass field.
        type: Python type of a filled cell; an empty cell means "not measured" or "does not apply".
        meaning: one line.
        unit: unit of a number, empty for texts and plain counts.
        better: which direction a user wants, where there is one.
        deterministic: equal in two runs of one configuration and seed on one machine.
        absent: what a row means whose file lacks the column; in columns that say how a run was set up or where it was,
            also one whose cell is empty.
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
    """A time that a clock measured."""
    return Column(group, name, float, meaning, unit="s", better="lower", deterministic=False)


def bytes_per_s(group: str, name: str, meaning: str) -> Column:
    """Bytes over such a time."""
    return Column(group, name, float, meaning, unit="bytes/s", better="higher", deterministic=False)


def num_bytes(group: str, name: str, meaning: str, *, deterministic: bool = True, absent: Any = None) -> Column:
    """Bytes that were sent, mean over what the meaning says."""
    return Column(group, name, float, meaning, "bytes", "lower", deterministic, absent)


def declared_columns(configuration: type[Configuration]) -> Iterator[Column]:
    """The columns that say what was asked for."""
    for option in configuration.options():
        recorded = option.recorded
        if recorded.column:
            yield identity(option.name, option.cell_type, option.meaning, unit=recorded.unit, absent=recorded.absent)
