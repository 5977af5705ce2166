"""Compare the runs in files, and return the comparison as a pandas table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.api.frames import frame, listed, type_of
from bench.api.progress import warn
from bench.core.run_folder import RUNS_FOLDER
from bench.core.schema import to_cell
from bench.report import comparison, groups, store, verdict
from bench.report.columns import find_numbers
from bench.report.comparison_table import comparison_table, shared_settings
from bench.report.quality import quality_of
from bench.report.statistics import SeedRule
from bench.report.tables import Table, records

if TYPE_CHECKING:
    import pandas as pd


def compare(
    paths: str | Path | Sequence[str | Path] = RUNS_FOLDER,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    target: float | str | Sequence[float | str] = (),
    rule: SeedRule = "fixed",
    by: str | Sequence[str] = (),
    where: str | Mapping[str, Any] | None = None,
    columns: str | Sequence[str] = (),
    sort: str | None = None,
    keep_going: bool = False,
    quiet: bool = False,
) -> pd.DataFrame:
    """Compare runs with a baseline like `bench compare`.

    Args:
        paths: run folders, folders of runs, CSV files, or patterns of these.
        baseline: the row that the others are compared with: a compressor, ``COMPRESSOR+COLLECTIVE``, or a run's name.
        metric: column that the verdict is about; by default ``samples_per_s``, or ``time_to_target_s`` with `target`.
        target: accuracies to reach, such as 0.9 or ``best-1``; or bits per byte of a text, such as 2.1.
        rule: "fixed" if the number of seeds was chosen before the first run, "anytime" if seeds were added until the
            result was clear.
        by: columns to group by; by default everything but the seed.
        where: use only runs with these values: ``{"dataset": "digits"}``.
        columns: further columns, of which the means are added.
        sort: column that orders the rows, best first.
        keep_going: skip, with a warning, paths that do not exist and files that cannot be used.
        quiet: do not print the comparison's warnings on stderr.

    Returns:
        One row per configuration, the baseline first, with the columns of ``bench compare --format csv``: ``gain`` is
        the factor by which the row is better (above 1) in the metric, ``gain_low`` and ``gain_high`` its 95 % interval,
        ``verdict`` what the seeds allow to conclude, ``accuracy_difference`` a share (of a text,
        ``bits_per_byte_difference``, relative to the baseline). ``attrs`` of the table holds the ``verdict`` in
        sentences, the ``warnings``, and the metric, baseline and settings.

    Raises:
        UsageError: a column or the baseline is unknown, or a target cannot be read.
        NothingToCompare: there is no readable row, or no run meets the conditions.
    """
    if isinstance(where, Mapping):
        conditions = [each for name in where for each in groups.parse_conditions(f"{name}={to_cell(where[name])}")]
    else:
        conditions = groups.parse_conditions(where) if where else []
    _, compared = read_and_compare(
        listed(paths),
        baseline=baseline,
        metric=metric,
        by=_texts(by),
        where=conditions,
        targets=_texts(target),
        sort=sort,
        rule=rule,
        keep_going=keep_going,
    )
    cautions = list(verdict.cautions(compared))
    table = comparison_table(compared, extra=find_numbers(_texts(columns)), cautions=cautions)
    caveats = list(verdict.caveats(compared))
    rows = records(table)
    names = dict.fromkeys(name for row in rows for name in row)
    found = frame(rows, {name: type_of([row.get(name) for row in rows]) for name in names})
    found.attrs.update(described(table, compared, caveats))
    if not quiet:
        for sentence in (*cautions, *caveats):
            warn(sentence)
    return found


def read_and_compare(
    paths: Sequence[str | Path], *, metric: str | None, targets: Sequence[str], keep_going: bool, **options: Any
) -> tuple[list[store.Row], comparison.Comparison]:
    """Return the rows in files, and the comparison of their runs.

    Args:
        paths: the files and folders.
        metric: column that the verdict is about; None chooses one that the rows have.
        targets: values to reach.
        keep_going: skip, with a warning, what cannot be read.
        options: further arguments of `comparison.compare`.
    """
    rows = store.read(paths, keep_going=keep_going, warn=warn)
    are_timed = any(row["samples_per_s"] is not None for row in rows)
    metric = metric or ("time_to_target_s" if targets else "samples_per_s" if are_timed else quality_of(rows).column)
    return rows, comparison.compare(rows, metric=metric, targets=targets, **options)


def described(table: Table, compared: comparison.Comparison, warnings: Sequence[str]) -> dict[str, Any]:
    """Return what belongs to a table beside its rows, by name: metric, baseline, verdict, warnings and so on."""
    return {
        "metric": compared.metric.name,
        "baseline": compared.baseline.title,
        "rule": compared.rule,
        "settings": shared_settings(compared),
        "verdict": list(table.answer),
        "warnings": [*table.cautions, *warnings],
    }


def _texts(items: float | str | Sequence[float | str]) -> list[str]:
    # A text may list several items, separated by commas.
    if isinstance(items, (int, float)):
        return [str(items)]
    return [part.strip() for text in ([items] if isinstance(items, str) else items) for part in str(text).split(",")]
