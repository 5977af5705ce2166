"""Convert values to the text of CSV cells, and cells back to values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS

# Largest number that a cell may hold. Integers up to 2**53 stay exact in tools that read every number as a float;
# floats up to 1e100 can be squared and averaged without overflow.
_LARGEST = {int: 2**53, float: 1e100}


def to_cells(values: Mapping[str, Any], columns: tuple[Column, ...] = METRICS) -> dict[str, str]:
    """Return one row as CSV cells; None and NaN become empty cells, booleans ``true`` and ``false``.

    Raises:
        KeyError: a value belongs to a column that the schema does not declare (a programming error).
    """
    unknown = set(values) - {column.name for column in columns}
    if unknown:
        raise KeyError(f"columns not in the schema: {sorted(unknown)}")
    return {column.name: _cell(values.get(column.name)) for column in columns}


def from_cell(cell: str, type_: type) -> Any:
    """Return a cell's value as this type; None for an empty cell and for an infinite or NaN float.

    Raises:
        ValueError: the cell does not hold a value of this type.
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
        return None  # an overflow is not a measured value
    if not abs(number) <= _LARGEST[type_]:
        raise ValueError(f"'{cell}' is not a number, or larger than anything that can be measured")
    if type_ is int and number != int(number):
        raise ValueError(f"'{cell}' is not a whole number")
    return type_(number)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
