"""Train with the options of `bench run`, and return the rows of the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import Unpack

from bench.api.comparing import load
from bench.api.execution import Residuals, train, warn_of_runs
from bench.api.keywords import by_option_name, takes_options
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.core.run_folder import RUNS_FOLDER
from bench.launch.jobs.failure import clear_away

if TYPE_CHECKING:
    import pandas as pd

    from bench.api import run_options


@dataclasses.dataclass(frozen=True, eq=False)
class Runs:
    """Finished runs.

    Attributes:
        folders: the folder of each run, in the order of execution.
        rows: the rows of all runs, as `load` returns them.
    """

    folders: list[Path]
    rows: pd.DataFrame = dataclasses.field(repr=False)

    def _repr_html_(self) -> str:
        return self.rows.dropna(axis="columns", how="all").to_html()


@takes_options(RunConfig)
def run(
    *,
    compressor: str | Sequence[str] | None = None,
    seeds: str | Sequence[int] | None = None,
    out: str | Path = RUNS_FOLDER,
    resume: str | Path | None = None,
    resume_residuals: Residuals | None = None,
    quiet: bool = False,
    **options: Unpack[run_options.RunOptions],
) -> Runs:
    """Train like `bench run`, once per seed and compressor.

    Args:
        compressor: a compressor, or several, which are run in turn.
        seeds: seeds, with one run per seed: a sequence, or a text such as ``1-5``.
        out: folder in which the runs' folders are made.
        resume: folder of a run to resume from its last checkpoint; only `world_size` and `timeout` can be changed.
        resume_residuals: what happens to the old ranks' residuals if `world_size` changes.
        quiet: print no progress and no notes on stderr, only warnings.
        options: the other options of `bench run`, with underscores: ``target_accuracy=0.95``.

    Returns:
        The runs, all of which ended well.

    Raises:
        UsageError: an option is unknown or not possible.
        RunFailed: a run failed. If there are several compressors, the other runs were still executed.
        Interrupted: the user pressed Ctrl-C during a run; the message says how to resume it.
    """
    clear_away()
    given = by_option_name(options, run)
    if compressor is not None:
        given["compressor"] = _as_text("compressor", compressor, "topk:ratio=0.01")
    trained = train(
        RunConfig(**given),
        given,
        seeds=None if seeds is None else _as_text("seeds", seeds, "1-5"),
        out=_as_path("out", out),
        resumed=None if resume is None else _as_path("resume", resume),
        residuals=resume_residuals,
        quiet=quiet,
    )
    warn_of_runs(trained.results)
    trained.raise_failures()
    folders = [result.folder.path for result in trained.results]
    return Runs(folders=folders, rows=load(folders))


def _as_text(keyword: str, given: object, example: str) -> str:
    """Return a text as it is, or the items of a list as one text, separated by commas as on the command line.

    Raises:
        UsageError: the value is neither a text nor a list.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, Iterable) or isinstance(given, (bytes, Mapping)):
        raise UsageError(f"{keyword}={given} is not possible: give a text such as '{example}', or a list")
    return ",".join(map(str, given))


def _as_path(keyword: str, given: object) -> Path:
    if not isinstance(given, (str, Path)):
        raise UsageError(f"{keyword}={given!r} is not possible: give the path of a folder")
    return Path(given)
