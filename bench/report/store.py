"""Store: finding result files and reading their rows, whatever state they are in."""

from __future__ import annotations

import dataclasses
import glob
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.core.errors import BenchError, NothingToCompare, UsageError
from bench.core.files import check_regular, files_below
from bench.core.rows import MissingColumns, RepeatedColumns, Warn, read_rows, warn_on_stderr
from bench.core.schema.column import Column
from bench.core.schema.layers import LAYERS
from bench.core.schema.metrics import METRICS

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
Found = TypeVar("Found")

Row = dict[str, Any]
"""Column -> value; None: not measured, or it does not apply."""

REQUIRED = ("run_id", "config_id", "seed", "compressor", "collective", "status")
"""Columns without which a row cannot be told apart from others; every other column may be missing."""

_ABSENT = {column.name: column.absent for column in METRICS}
_IN_EVERY_ROW = [c.name for c in METRICS if c.group in ("identity", "origin") and c.absent is not None]
"""Columns that every row has: empty cells of them are those of files that were put together of old and new ones."""
_OLD_RANK = re.compile(r"\bapprox_rank=")
"""The option `rank` of powersgd and torch_powersgd as older files spell it."""
# Types that can be empty: an int or bool column with a hole must not turn into floats or objects.
_DTYPES = {int: "Int64", float: "float64", bool: "boolean", str: "object"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    path: Path
    chosen: bool  # the user named this very file, rather than a folder above it


def read(
    paths: Sequence[str | Path],
    *,
    without: Collection[Path] = (),
    keep_going: bool = False,
    warn: Warn = warn_on_stderr,
) -> list[Row]:
    """Return all readable rows below the given paths, each once: runs in the order of files, rows as they were written.

    Args:
        paths: run folders, folders of run folders, CSV files, or glob patterns of these.
        without: files that are known to hold something else.
        keep_going: leave out, with a warning, what would otherwise be an error: a path that does not exist, a file that
            was named and is none of ours or cannot be read.
        warn: told one sentence for everything that was left out; by default it goes to stderr.

    Returns:
        One per CSV row, with every column of the schema (missing ones None, or what the schema says that they mean).

    Raises:
        UsageError: a file that was named lacks a required column, or any has a column twice (the message names it).
        NothingToCompare: a path does not exist, a file cannot be read, or no path holds a readable row.
    """
    others = {path.absolute() for path in without}
    sources = [each for each in _all_sources(paths, keep_going, warn) if each.path.absolute() not in others]
    # A run folder beside a file that collects several runs gives the same rows twice.
    rows = {tuple(row.values()): row for row in _each(_rows, sources, keep_going, warn)}
    if not rows:
        places = ", ".join(str(path) for path in paths)
        raise NothingToCompare(f"there is no readable row in {places}; `bench run` writes rows to results/runs")
    return _in_order(rows.values())


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """Undo the sorting of another program; a row written at the end of an attempt follows its evaluations."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(run_key(row), []).append(row)
    return [row for evaluations in runs.values() for row in sorted(evaluations, key=_when)]


def run_key(row: Row) -> tuple[Any, ...]:
    """Return what the rows of one run have in common."""
    return row["run_id"] or row["config_id"], row["seed"]


def _when(row: Row) -> tuple[int, bool, float]:
    return row["resumes"] or 0, row["status"] != "running", math.inf if row["step"] is None else row["step"]


def read_layers(paths: Sequence[str | Path], *, warn: Warn = warn_on_stderr) -> list[Row]:
    """The rows of every layers.csv beside the files that ``read`` reads; none where there is no such file.

    Args:
        paths: what ``read`` takes.
        warn: told one sentence for every line that is left out.
    """
    return [row for file in beside(paths, "layers.csv") for row in _layers(file, warn)]


def _layers(file: Path, warn: Warn) -> list[Row]:
    try:
        return list(read_rows(file, LAYERS, required=("run_id", "layer", "step"), warn=warn))
    except (OSError, MissingColumns, RepeatedColumns) as error:
        warn(f"{file} is left out: {error}")
        return []


def beside(paths: Sequence[str | Path], name: str) -> list[Path]:
    """The files of this name in the folders whose metrics ``read`` reads, in the same order."""
    folders = dict.fromkeys(source.path.parent for source in _all_sources(paths, False, lambda sentence: None))
    return [folder / name for folder in folders if (folder / name).is_file()]


def to_frame(rows: Sequence[Row], schema: Sequence[Column] = METRICS) -> pd.DataFrame:
    """Rows as a data frame, its columns in the schema's order and types."""
    import pandas as pd

    return pd.DataFrame(
        {
            column.name: pd.Series([row.get(column.name) for row in rows], dtype=_DTYPES[column.type])
            for column in schema
        }
    )


def _each(
    function: Callable[[T, Warn], Iterable[Found]], things: Iterable[T], keep_going: bool, warn: Warn
) -> Iterator[Found]:
    """All that the function finds in all things; with ``keep_going`` a thing that is an error is a warning."""
    for thing in things:
        try:
            yield from function(thing, warn)
        except BenchError as error:
            if not keep_going:
                raise
            warn(f"{error}; it is left out")


def _all_sources(paths: Sequence[str | Path], keep_going: bool, warn: Warn) -> list[_Source]:
    """Each file once, though several paths may lead to it."""
    found = _each(_sources, map(str, paths), keep_going, warn)
    return list({source.path.absolute(): source for source in found}.values())


def _sources(path: str, warn: Warn) -> Iterator[_Source]:
    matches = [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))  # noqa: PTH207 (absolute ones)
    if not matches:
        raise NothingToCompare(f"{path} does not exist; give a run folder, a folder of runs or a CSV file")
    for match in map(Path, matches):
        if match.is_dir():
            files = files_below(match, "metrics.csv") or sorted(match.glob("*.csv"))
            if not files:
                warn(f"{match} is left out: it holds no metrics.csv")
            yield from (_Source(path=file, chosen=False) for file in files)
        else:
            yield _Source(path=match, chosen=True)


def _rows(source: _Source, warn: Warn) -> list[Row]:
    check_regular(source.path)
    try:
        rows = read_rows(source.path, required=REQUIRED, warn=warn)
    except OSError as error:
        raise NothingToCompare(f"{source.path} cannot be read: {error.strerror or error}") from None
    except MissingColumns as error:
        if source.chosen:
            raise UsageError(
                f"{source.path} is not a metrics file of bench, {error}; give a run folder or its metrics.csv"
            ) from None
        warn(f"{source.path} is left out: {error}")
        return []
    except RepeatedColumns as error:
        raise UsageError(f"{source.path}: {error}; remove all but one of them") from None
    if not rows:
        warn(f"{source.path} is left out: it is empty, or no row of it can be read")
        return []
    for row in rows:
        row |= {name: _ABSENT[name] for name in _IN_EVERY_ROW if row.get(name) is None}
        if row.get("compressor"):
            row["compressor"] = _OLD_RANK.sub("rank=", row["compressor"])
    return rows if all(name in rows[0] for name in _ABSENT) else [_ABSENT | row for row in rows]
