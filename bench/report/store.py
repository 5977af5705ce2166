"""Store: finding result files and reading them into one table, whatever state they are in."""

from __future__ import annotations

import dataclasses
import glob
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core.errors import NothingToCompare, UsageError
from bench.core.files import check_regular
from bench.core.rows import Warn, read_header, read_rows, warn_on_stderr
from bench.core.schema import METRICS

if TYPE_CHECKING:
    import pandas as pd

REQUIRED = ("run_id", "config_id", "seed", "compressor", "collective", "status")
"""Columns without which a row cannot be told apart from others; every other column may be missing."""

# Types that can be empty: an int or bool column with a hole must not turn into floats or objects.
_DTYPES = {int: "Int64", float: "float64", bool: "boolean", str: "object"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    path: Path
    chosen: bool  # the user named this very file, rather than a folder above it


def load(paths: Sequence[str | Path], *, warn: Warn = warn_on_stderr) -> pd.DataFrame:
    """All readable rows below the given paths, in the order of the files, each row once.

    Args:
        paths: run folders, folders of run folders, CSV files, or glob patterns of these.
        warn: told one sentence for everything that was left out; by default it goes to stderr.

    Returns:
        One row per CSV row, with every column of the schema (missing ones empty, or what the schema says that they
        mean) in the schema's order and types.

    Raises:
        UsageError: a file that was named lacks a required column (the message names it).
        NothingToCompare: a path does not exist, or no path holds a readable row.
    """
    sources = {os.path.realpath(source.path): source for path in paths for source in _sources(str(path), warn)}
    rows = [row for source in sources.values() for row in _rows(source, warn)]
    if not rows:
        places = ", ".join(str(path) for path in paths)
        raise NothingToCompare(f"there is no readable row in {places}; `bench run` writes rows to results/runs")
    return _frame(rows)


def _sources(path: str, warn: Warn) -> Iterator[_Source]:
    matches = [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))  # noqa: PTH207 (absolute ones)
    if not matches:
        raise NothingToCompare(f"{path} does not exist; give a run folder, a folder of runs or a CSV file")
    for match in map(Path, matches):
        if match.is_dir():
            files = sorted(match.rglob("metrics.csv")) or sorted(match.glob("*.csv"))
            if not files:
                warn(f"{match} is left out: it holds no metrics.csv")
            yield from (_Source(path=file, chosen=False) for file in files)
        else:
            yield _Source(path=match, chosen=True)


def _rows(source: _Source, warn: Warn) -> list[dict[str, Any]]:
    check_regular(source.path)
    try:
        header = _header(source.path)
        missing = [name for name in REQUIRED if name not in header]
        if not missing:
            return [row for row in read_rows(source.path, warn=warn) if _is_complete(row, source.path, warn)]
    except OSError as error:
        raise NothingToCompare(f"{source.path} cannot be read: {error.strerror or error}") from None
    if header and source.chosen:
        raise UsageError(
            f"{source.path} is not a metrics file of bench, it has no column {', '.join(missing)}; "
            "give a run folder or its metrics.csv"
        )
    warn(f"{source.path} is left out: it {'has no column ' + ', '.join(missing) if header else 'is empty'}")
    return []


def _header(path: Path) -> list[str]:
    try:
        return read_header(path)
    except ValueError:
        return ["(not a CSV file)"]  # a foreign file like any other: none of the required columns


def _is_complete(row: dict[str, Any], path: Path, warn: Warn) -> bool:
    empty = [name for name in REQUIRED if row[name] is None]
    if empty:
        warn(f"{path}: a row of run {row['run_id'] or '(unnamed)'} is skipped: {', '.join(empty)} is empty")
    return not empty


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    import pandas as pd

    columns = {
        column.name: pd.Series([row.get(column.name, column.absent) for row in rows], dtype=_DTYPES[column.type])
        for column in METRICS
    }
    # A run folder beside a file that collects several runs gives the same rows twice.
    return pd.DataFrame(columns).drop_duplicates(ignore_index=True)
