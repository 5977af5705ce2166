"""Cells: how a value is written in a CSV file, and read from it again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS

# Whole numbers up to here are exact as floats, as other tools read them; of squares of the others a mean can be taken.
_LARGEST = {int: 2**53, float: 1e100}


def to_cells(values: Mapping[str, Any], columns: tuple[Column, ...] = METRICS) -> dict[str, str]:
    """One row as CSV cells; None and NaN become empty cells, flags ``true`` and ``false``.

    Raises:
        KeyError: a value whose column the schema does not declare (a programming error).
    """
    unknown = set(values) - {column.name for column in columns}
    if unknown:
        raise KeyError(f"columns not in the schema: {sorted(unknown)}")
    return {column.name: _cell(values.get(column.name)) for column in columns}


def from_cell(cell: str, type_: type) -> Any:
    """The value of a cell of this type, None where it is empty.

    Raises:
        ValueError: the cell does not hold the type.
    """
    if cell == "":
        return None
    if type_ is bool:
        if cell.lower() not in ("true", "false"):
            raise ValueError(f"'{cell}' is neither true nor false")
        return cell.lower() == "true"
    if type_ is str:
        return cell
    number = float(cell)
    if type_ is float and not math.isfinite(number):
        return None  # what overflowed is no measured value
    if not abs(number) <= _LARGEST[type_]:
        raise ValueError(f"'{cell}' is no number, or larger than anything that can be measured")
    if type_ is int and number != int(number):
        raise ValueError(f"'{cell}' is no whole number")
    return type_(number)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
