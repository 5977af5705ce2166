"""Return rows as pandas tables with typed columns, in which a missing value is not a number but NA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core.run_folder import RUNS_FOLDER
from bench.core.schema import METRICS
from bench.report import store
from bench.report.store import frame

if TYPE_CHECKING:
    import pandas as pd


def load(paths: str | Path | Sequence[str | Path] = RUNS_FOLDER, *, keep_going: bool = False) -> pd.DataFrame:
    """Return the rows of runs: one per evaluation, and one at the end of every run.

    Columns with whole numbers, flags and texts have dtypes that know NA (``Int64``, ``boolean``, ``string``); all other
    numbers are ``float64``. An empty cell is NA or NaN.

    Args:
        paths: run folders, folders of runs, CSV files, or patterns of these.
        keep_going: skip, with a warning on stderr, paths that do not exist and files that cannot be used.

    Raises:
        UsageError: a file is not one of `bench`.
        NothingToCompare: a path does not exist, or no path leads to a readable row.
    """
    rows = store.read(listed(paths), keep_going=keep_going)
    return frame(rows, {column.name: column.type for column in METRICS})


def type_of(values: Sequence[Any]) -> type:
    """Return the common Python type of values, float if there is a float or no value at all."""
    kinds = {type(value) for value in values if value is not None}
    return float if not kinds or float in kinds else kinds.pop()


def listed(items: str | Path | Sequence[str | Path]) -> list[str | Path]:
    """Return the items, or the only item, as a list."""
    return [items] if isinstance(items, (str, Path)) else list(items)
