"""Find result files and read their rows, even if the files are damaged or of an older version."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bench.core.errors import DIVERGED, BenchError, NothingToCompare, UsageError
from bench.core.files import check_regular, files_below
from bench.core.rows import MissingColumns, RepeatedColumns, Warn, read_rows, warn_on_stderr
from bench.core.schema import LAYERS, METRICS
from bench.core.waiting import waiting

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

Row = dict[str, Any]  # the value of each column; None: not measured, or not applicable

# Columns that identify a row; every other column may be missing.
REQUIRED = ("run_id", "config_id", "seed", "compressor", "collective", "status")

_ABSENT = {column.name: column.absent for column in METRICS}
# Columns that every new row fills; an empty cell shows that older and newer files were concatenated.
_IN_EVERY_ROW = [c.name for c in METRICS if c.group in ("identity", "origin") and c.absent is not None]


def read(
    paths: Sequence[str | Path],
    *,
    without: Collection[Path] = (),
    keep_going: bool = False,
    warn: Warn = warn_on_stderr,
) -> list[Row]:
    """Return all readable rows of the metrics files at and below the given paths, without duplicates.

    Files are in the order of the paths, and the rows of each run are in order of writing.

    Args:
        paths: run folders, folders of run folders, CSV files, or glob patterns of these.
        without: files to skip.
        keep_going: if True, skip a path that does not exist or a file that cannot be used, with a warning; if False,
            raise an error.
        warn: called with one sentence for every path, file or line that is skipped; by default it prints to stderr.

    Returns:
        One dictionary per CSV row, with a value for every column of `METRICS`. For a column that the file lacks, the
        value is the column's ``absent``: the default that is assumed for older files, or None.

    Raises:
        UsageError: a file that the user named lacks a required column, or any file has the same column twice.
        NothingToCompare: a path does not exist, a file cannot be read, or no path leads to a readable row.
    """
    left_out = {path.absolute() for path in without}
    rows: dict[tuple[Any, ...], Row] = {}
    for file, is_named in _files(paths, keep_going, warn).items():
        waiting.doing(f"reading {file}")
        with _left_out_if(keep_going, warn):
            if file.absolute() not in left_out:
                # The same rows may be in a run folder and in a file that collects several runs.
                rows |= {tuple(row.values()): row for row in _rows(file, is_named, warn)}
    if not rows:
        raise NothingToCompare(
            f"there is no readable row in {', '.join(map(str, paths))}; `bench run` writes rows to results/runs"
        )

    def when(row: Row) -> tuple[int, bool, float]:
        return row["resumes"] or 0, row["status"] != "running", math.inf if row["step"] is None else row["step"]

    # Restore the order of writing within each run, in case another program sorted the rows.
    return [row for run in collect_runs(list(rows.values())) for row in sorted(run.rows, key=when)]


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group the items by key; the keys, and the items of each key, are in order of appearance."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@contextlib.contextmanager
def _left_out_if(keep_going: bool, warn: Warn) -> Iterator[None]:
    try:
        yield
    except BenchError as error:
        if not keep_going:
            raise
        warn(f"left out: {error}")


def read_layers(paths: Sequence[str | Path], *, warn: Warn = warn_on_stderr) -> list[Row]:
    """Return the rows of every ``layers.csv`` in the folders from which `read` reads metrics.

    Args:
        paths: the same paths as for `read`.
        warn: called with one sentence for every line or file that is skipped.
    """
    rows: list[Row] = []
    for file in beside(paths, "layers.csv"):
        try:
            rows += read_rows(file, LAYERS, required=("run_id", "layer", "step"), warn=warn)
        except (OSError, MissingColumns, RepeatedColumns) as error:
            warn(f"{file} is left out: {error}")
    return rows


def beside(paths: Sequence[str | Path], name: str) -> list[Path]:
    """Return the files with this name that exist in the folders from which `read` reads metrics.

    Args:
        paths: the same paths as for `read`; the returned files are in the order of these paths.
        name: the name of the files, such as ``environment.json``.
    """
    folders = dict.fromkeys(file.parent for file in _files(paths, False, lambda sentence: None))
    return [folder / name for folder in folders if (folder / name).is_file()]


def _files(paths: Sequence[str | Path], keep_going: bool, warn: Warn) -> dict[Path, bool]:
    # Return each file once, even if several paths lead to it; the value is True if the user named the file itself, and
    # False if the user named a folder above it.
    found: dict[Path, tuple[Path, bool]] = {}
    for path in paths:
        with _left_out_if(keep_going, warn):
            matches = matching(path)
            if not matches:
                raise NothingToCompare(f"{path} does not exist; give a run folder, a folder of runs or a CSV file")
            for match in matches:
                files = [match]
                if match.is_dir():
                    files = files_below(match, "metrics.csv") or sorted(match.glob("*.csv"))
                if not files:
                    warn(f"{match} is left out: it holds no metrics.csv")
                found |= {file.absolute(): (file, file is match) for file in files}
    return dict(found.values())


def matching(path: str | Path) -> list[Path]:
    """Return the path itself if it exists; otherwise the existing paths that match it as a glob pattern, sorted."""
    found = [str(path)] if Path(path).exists() else sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 (absolute ones)
    return list(map(Path, found))


def _rows(file: Path, is_named: bool, warn: Warn) -> list[Row]:
    check_regular(file)
    try:
        rows = read_rows(file, required=REQUIRED, warn=warn)
    except OSError as error:
        raise NothingToCompare(f"{file} cannot be read: {error.strerror or error}") from None
    except MissingColumns as error:
        if is_named:
            raise UsageError(
                f"{file} is not a metrics file of bench, {error}; give a run folder or its metrics.csv"
            ) from None
        warn(f"{file} is left out: {error}")
        return []
    except RepeatedColumns as error:
        raise UsageError(f"{file}: {error}; remove all but one of them") from None
    if not rows:
        warn(f"{file} is left out: it is empty, or none of its rows can be read")
    for row in rows:
        row |= {name: _ABSENT[name] for name in _IN_EVERY_ROW if row.get(name) is None}
    return rows if rows and rows[0].keys() >= _ABSENT.keys() else [_ABSENT | row for row in rows]


_MEASURED = [column.name for column in METRICS if column.group not in ("identity", "origin")]
_ENDINGS = {"running": "is still running, or was killed", "interrupted": "was interrupted", "timeout": "timed out"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training run and its rows of metrics.csv.

    ``run["samples_per_s"]`` is the last known value of that column.

    Attributes:
        rows: the run's rows in order of writing, at least one; each is an evaluation or the end of the run.
    """

    rows: list[Row]

    def __getitem__(self, column: str) -> Any:
        return self.last_known[column]

    @functools.cached_property
    def last_known(self) -> Row:
        """The last known value of each column of the run.

        The value of a measured column may come from an earlier row than the last one: the row of a failure, for
        example, has no speed.
        """
        newest = self.rows[::-1]
        known = {name: next((row[name] for row in newest if row[name] is not None), None) for name in _MEASURED}
        return newest[0] | known

    @property
    def title(self) -> str:
        """A title such as ``topk:ratio=0.01 + allgather, seed 1``."""
        return f"{self['compressor']} + {self['collective']}, seed {self['seed']}"

    @property
    def ending(self) -> str:
        """A verb phrase that says how the run ended, such as ``was interrupted``."""
        return _ENDINGS.get(self["status"], str(self["status"]))

    @property
    def ended_well(self) -> bool:
        """True if the run was successful; means and verdicts use only such runs."""
        return bool(self["status"] == "ok")

    @property
    def diverged(self) -> bool:
        """True if the run failed because its training diverged; it would diverge again if the run was repeated."""
        return bool(self["status"] == "failed" and self["error_kind"] == DIVERGED)

    @property
    def in_sync(self) -> bool | None:
        """True if all ranks had equal parameters at every evaluation; None if no evaluation recorded this."""
        known = [row["replicas_in_sync"] for row in self.rows if row["replicas_in_sync"] is not None]
        return all(known) if known else None


def interval_steps(rows: Sequence[Row]) -> list[int | None]:
    """Return the number of optimizer steps between consecutive evaluations of a run.

    Args:
        rows: the rows of the run, in order of writing.

    Returns:
        For each row, the number of steps since the previous row; for the first row, since the start of the run. None
        where the number is unknown, or where the run was resumed with another number of ranks, because this restarts
        the count of steps.
    """
    ranks = [row["world_size"] for row in (*rows[:1], *rows)]
    steps = [0, *(row["step"] for row in rows)]
    return [
        None if None in pair or before != now or pair[1] < pair[0] else pair[1] - pair[0]
        for pair, (before, now) in zip(itertools.pairwise(steps), itertools.pairwise(ranks), strict=True)
    ]


def collect_runs(rows: Sequence[Row]) -> list[Run]:
    """Group rows into runs, in order of appearance.

    A run that was resumed with another number of ranks has rows of several configurations; it counts as a run of the
    last configuration.
    """
    runs = grouped(rows, lambda row: (row["run_id"] or row["config_id"], row["seed"]))
    return [Run(rows=evaluations) for evaluations in runs.values()]


def one_per_seed(runs: Sequence[Run], keys: Sequence[str] = ("config_id",)) -> tuple[list[Run], list[Run]]:
    """Choose for each configuration and seed the newest successful run, or the newest run if none was successful.

    Args:
        runs: any runs.
        keys: columns that identify a configuration; runs that differ in any of them are not repeats of each other.

    Returns:
        Two lists: the chosen runs, in the order of ``runs``; and the part of them that was chosen among several runs of
        one configuration and seed.
    """
    alike = grouped(runs, lambda run: tuple(run[key] for key in (*keys, "seed"))).values()
    newest = [sorted(same, key=lambda run: (run.ended_well, run["started_at"] or ""))[-1] for same in alike]
    return newest, [run for run, same in zip(newest, alike, strict=True) if len(same) > 1]


# Nullable types: a column with an empty cell must not turn into floats or objects.
_DTYPES = {str: "string", int: "Int64", float: "float64", bool: "boolean"}


def frame(rows: Sequence[Mapping[str, Any]], types: Mapping[str, type]) -> pd.DataFrame:
    """Return rows as a pandas table.

    Args:
        rows: for each row, the values by column name; None is a missing value.
        types: Python type of each column's values, in the order of the columns.
    """
    import pandas as pd  # takes long

    return pd.DataFrame(
        {name: pd.Series([row.get(name) for row in rows], dtype=_DTYPES[kind]) for name, kind in types.items()}
    )
