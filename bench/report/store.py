"""Find result files and read their rows, even if the files are damaged or of an older version."""

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


import functools
import itertools

T = TypeVar("T")
Found = TypeVar("Found")

Row = dict[str, Any]  # the value of each column; None: not measured, or it does not apply

# Columns that identify a row; every other column may be missing.
REQUIRED = ("run_id", "config_id", "seed", "compressor", "collective", "status")

_ABSENT = {column.name: column.absent for column in METRICS}
# Columns that every new row fills: they are empty only in concatenations of older and newer files.
_IN_EVERY_ROW = [c.name for c in METRICS if c.group in ("identity", "origin") and c.absent is not None]
# Older files spell the option `rank` of powersgd and torch_powersgd like this.
_OLD_RANK = re.compile(r"\bapprox_rank=")
# Nullable types: an int or bool column with an empty cell must not turn into floats or objects.
_DTYPES = {int: "Int64", float: "float64", bool: "boolean", str: "object"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    path: Path
    chosen: bool  # the user named this file, not a folder above it


def read(
    paths: Sequence[str | Path],
    *,
    without: Collection[Path] = (),
    keep_going: bool = False,
    warn: Warn = warn_on_stderr,
) -> list[Row]:
    """Return all readable rows below the given paths without duplicates, in the order of files and of writing.

    Args:
        paths: run folders, folders of run folders, CSV files, or glob patterns of these.
        without: files to skip.
        keep_going: skip, with a warning, what would otherwise be an error: a path that does not exist, or a named file
            that cannot be read or is not a metrics file.
        warn: receives one sentence for everything that is skipped; by default it prints to stderr.

    Returns:
        One dictionary per CSV row with every column of the schema; missing columns have the schema's default or None.

    Raises:
        UsageError: a named file lacks a required column, or any file has a column twice.
        NothingToCompare: a path does not exist, a file cannot be read, or no path holds a readable row.
    """
    others = {path.absolute() for path in without}
    sources = [each for each in _all_sources(paths, keep_going, warn) if each.path.absolute() not in others]
    # The same rows may be in a run folder and in a file that collects several runs.
    rows = {tuple(row.values()): row for row in _each(_rows, sources, keep_going, warn)}
    if not rows:
        places = ", ".join(str(path) for path in paths)
        raise NothingToCompare(f"there is no readable row in {places}; `bench run` writes rows to results/runs")
    return _in_order(rows.values())


def _in_order(rows: Iterable[Row]) -> list[Row]:
    """Restore the order of writing within each run, in case another program sorted the rows."""
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(run_key(row), []).append(row)
    return [row for evaluations in runs.values() for row in sorted(evaluations, key=_when)]


def run_key(row: Row) -> tuple[Any, ...]:
    """Return a key that all rows of one run share."""
    return row["run_id"] or row["config_id"], row["seed"]


def _when(row: Row) -> tuple[int, bool, float]:
    return row["resumes"] or 0, row["status"] != "running", math.inf if row["step"] is None else row["step"]


def read_layers(paths: Sequence[str | Path], *, warn: Warn = warn_on_stderr) -> list[Row]:
    """Return the rows of every layers.csv next to the files that ``read`` reads.

    Args:
        paths: the same paths as for ``read``.
        warn: receives one sentence for every line that is skipped.
    """
    return [row for file in beside(paths, "layers.csv") for row in _layers(file, warn)]


def _layers(file: Path, warn: Warn) -> list[Row]:
    try:
        return list(read_rows(file, LAYERS, required=("run_id", "layer", "step"), warn=warn))
    except (OSError, MissingColumns, RepeatedColumns) as error:
        warn(f"{file} is left out: {error}")
        return []


def beside(paths: Sequence[str | Path], name: str) -> list[Path]:
    """Return the files of this name in the folders that ``read`` reads metrics from, in the same order."""
    folders = dict.fromkeys(source.path.parent for source in _all_sources(paths, False, lambda sentence: None))
    return [folder / name for folder in folders if (folder / name).is_file()]


def to_frame(rows: Sequence[Row], schema: Sequence[Column] = METRICS) -> pd.DataFrame:
    """Return the rows as a data frame with the schema's columns, order and types."""
    import pandas as pd

    return pd.DataFrame(
        {
            column.name: pd.Series([row.get(column.name) for row in rows], dtype=_DTYPES[column.type])
            for column in schema
        }
    )


def _each(
    function: Callable[[T, Warn], Iterable[Found]], items: Iterable[T], keep_going: bool, warn: Warn
) -> Iterator[Found]:
    """Yield all results of the function over the items; with ``keep_going`` an error becomes a warning."""
    for item in items:
        try:
            yield from function(item, warn)
        except BenchError as error:
            if not keep_going:
                raise
            warn(f"{error}; it is left out")


def _all_sources(paths: Sequence[str | Path], keep_going: bool, warn: Warn) -> list[_Source]:
    """Return each file once, even if several paths lead to it."""
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


_MEASURED = [column.name for column in METRICS if column.group not in ("identity", "origin")]


_ENDINGS = {"running": "is still running, or was killed", "interrupted": "was interrupted", "timeout": "timed out"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run; ``run["samples_per_s"]`` is the last known value of a column.

    Attributes:
        rows: the run's evaluations in the order of the file, at least one.
    """

    rows: list[Row]

    def __getitem__(self, column: str) -> Any:
        """Return the last known value of a column."""
        return self.last_known[column]

    @functools.cached_property
    def last_known(self) -> Row:
        """The last known value of each column: the last row after a failure has no speed, for example."""
        known = dict(self.rows[-1])
        for column in _MEASURED:
            if known[column] is None:
                known[column] = next((row[column] for row in reversed(self.rows) if row[column] is not None), None)
        return known

    @property
    def title(self) -> str:
        """A title such as ``topk:ratio=0.01 + allgather, seed 1``."""
        return f"{self['compressor']} + {self['collective']}, seed {self['seed']}"

    @property
    def ending(self) -> str:
        """The way the run ended, as a predicate: ``was interrupted``."""
        return _ENDINGS.get(self["status"], str(self["status"]))

    @property
    def ended_well(self) -> bool:
        """True if the run was successful, so that its figures count."""
        return bool(self["status"] == "ok")

    @property
    def unfinished(self) -> bool:
        """True if the run was stopped from outside or is still running, which says nothing about its method."""
        return self["status"] in ("interrupted", "running")

    @property
    def diverged(self) -> bool:
        """True if the run failed because its training diverged, which repeating it would not change."""
        return self["status"] == "failed" and "has diverged" in (self["error"] or "")

    @property
    def samples_per_s_in_all(self) -> float | None:
        """Samples per second over the whole training; `samples_per_s` covers only the last evaluation interval."""
        steps, seconds = self["step"], self["train_time_s"]
        per_step = (self["batch_size"] or 0) * (self["accumulate"] or 1) * (self["replicas"] or self["world_size"] or 0)
        return steps * per_step / seconds if steps and seconds and per_step else None

    @property
    def payload_bytes_per_step_in_all(self) -> float | None:
        """Payload bytes per step over the whole training, not only over the last evaluation interval."""
        sent = [
            (number, row["payload_bytes_per_step"]) for number, row in zip(self.interval_steps, self.rows, strict=True)
        ]
        if not sent or any(number is None or nbytes is None for number, nbytes in sent) or not self["step"]:
            return None
        return float(sum(number * nbytes for number, nbytes in sent) / self["step"])

    @property
    def interval_steps(self) -> list[int | None]:
        """Steps from one evaluation to the next; None where a resume with other ranks restarted the count."""
        return interval_steps(self.rows)

    @property
    def in_sync(self) -> bool | None:
        """True if the ranks had equal parameters at every evaluation; None: not known."""
        known = [row["replicas_in_sync"] for row in self.rows if row["replicas_in_sync"] is not None]
        return all(known) if known else None


def interval_steps(rows: Sequence[Row]) -> list[int | None]:
    """Return the same as `Run.interval_steps` for some of a run's rows."""
    if not rows:
        return []
    ranks = [rows[0]["world_size"], *(row["world_size"] for row in rows)]
    steps = [0, *(row["step"] for row in rows)]
    return [
        None if None in pair or before != now or pair[1] < pair[0] else pair[1] - pair[0]
        for pair, (before, now) in zip(itertools.pairwise(steps), itertools.pairwise(ranks), strict=True)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat:
    """A seed that was run more than once in one configuration.

    Attributes:
        counted: the run that counts for the seed.
        superseded: the other runs.
    """

    counted: Run
    superseded: list[Run]


def collect_runs(rows: Sequence[Row]) -> list[Run]:
    """Return the runs that the rows belong to, in order of appearance.

    A run that was resumed with other ranks has rows of both configurations and belongs to the last one.
    """
    runs: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        runs.setdefault(run_key(row), []).append(row)
    return [Run(rows=evaluations) for evaluations in runs.values()]


def one_per_seed(runs: Sequence[Run], keys: Sequence[str] = ("config_id",)) -> tuple[list[Run], list[Repeat]]:
    """Keep for each configuration and seed the newest successful run, or else the newest run.

    Args:
        runs: any runs.
        keys: columns that distinguish configurations; runs that differ in one of them are never repeats.

    Returns:
        The runs that count, in the order given, and the seeds that were run more than once.
    """
    alike: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        alike.setdefault(tuple(run[key] for key in (*keys, "seed")), []).append(run)
    counted, repeats = [], []
    for same in alike.values():
        *others, newest = sorted(same, key=_counts_last)
        counted.append(newest)
        if others:
            repeats.append(Repeat(counted=newest, superseded=others))
    return counted, repeats


def newest(runs: Sequence[Run]) -> Run:
    """Return the newest successful run, or else the newest run."""
    return max(runs, key=_counts_last)


def _counts_last(run: Run) -> tuple[bool, str]:
    return run.ended_well, run["started_at"] or ""
