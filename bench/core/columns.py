"""A column of a CSV file, and the text of its cells."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Literal

from bench.core.config.configuration import Configuration


@dataclasses.dataclass(frozen=True, eq=False)
class Column:
    """One column of a CSV file. Each column is declared once and compares equal only to itself.

    Attributes:
        group: heading under which the documentation lists the column.
        name: the column's heading, which is also the JSON key and the name of the dataclass field.
        type: Python type of a filled cell; an empty cell means "not measured" or "does not apply".
        meaning: explanation in one line.
        unit: unit of a number; empty for text and plain counts.
        better: the direction in which values improve; empty if neither direction is better.
        deterministic: True if two runs with the same configuration and seed on one machine have the same value.
        absent: value to assume in rows of a file that lacks this column. If the column describes how or where a run
            was made, this is also the value to assume for an empty cell.
    """

    group: str
    name: str
    type: type
    meaning: str
    unit: str = ""
    better: Literal["", "higher", "lower"] = ""
    deterministic: bool = True
    absent: Any = None


identity = partial(Column, "identity")


def seconds(group: str, name: str, meaning: str) -> Column:
    """Return a column of a measured time in seconds; shorter times are better."""
    return Column(group, name, float, meaning, unit="s", better="lower", deterministic=False)


def bytes_per_s(group: str, name: str, meaning: str) -> Column:
    """Return a column of a measured rate in bytes per second; higher rates are better."""
    return Column(group, name, float, meaning, unit="bytes/s", better="higher", deterministic=False)


def num_bytes(group: str, name: str, meaning: str, *, deterministic: bool = True, absent: Any = None) -> Column:
    """Return a column of a number of bytes sent; fewer bytes are better."""
    return Column(group, name, float, meaning, "bytes", "lower", deterministic, absent)


def declared_columns(configuration: type[Configuration]) -> Iterator[Column]:
    """Yield a column of the group "identity" for each option of a configuration that is recorded in CSV files."""
    for option in configuration.options():
        recorded = option.recorded
        if recorded.column:
            yield identity(option.name, option.cell_type, option.meaning, unit=recorded.unit, absent=option.default)


# Largest number that a cell may hold. Integers up to 2**53 stay exact in tools that read every number as a float;
# floats up to 1e100 can be squared and averaged without overflow.
_LARGEST = {int: 2**53, float: 1e100}


def to_cells(values: Mapping[str, Any], columns: tuple[Column, ...]) -> dict[str, str]:
    """Return one row as CSV cells: column name -> text, in the order of `columns`; cells without a value are empty.

    Raises:
        KeyError: a value belongs to none of the columns (a programming error).
    """
    unknown = set(values) - {column.name for column in columns}
    if unknown:
        raise KeyError(f"columns not in the schema: {sorted(unknown)}")
    return {column.name: to_cell(values.get(column.name)) for column in columns}


def from_cell(cell: str, type_: type) -> Any:
    """Return the value in a CSV cell, converted to this type; None for an empty cell, and for an infinite or NaN float.

    Raises:
        ValueError: the cell does not hold a value of this type, or a number that is too large to be a measurement.
    """
    if cell == "":
        return None
    if type_ is bool:
        if cell.lower() not in ("true", "false"):
            raise ValueError(f"'{cell}' is not one of true and false, the only values of its column")
        return cell.lower() == "true"
    if type_ is str:
        return cell
    number = float(cell)
    if type_ is float and not math.isfinite(number):
        return None  # an overflow is not a measured value
    if not abs(number) <= _LARGEST[type_]:
        raise ValueError(f"'{cell}' is not a number, or larger than anything that can be measured")
    if type_ is int and number != int(number):
        raise ValueError(f"'{cell}' is not a whole number, as all values of its column are")
    return type_(number)


def to_cell(value: Any) -> str:
    """Return a value as the text of a CSV cell; None and NaN become "", booleans become ``true`` and ``false``."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
