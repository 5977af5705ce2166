"""Read runs from files as a pandas table, or compare them with a baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator
from typing_extensions import Doc

from bench.api.keywords import by_option_name, keywords_of, takes_options
from bench.api.progress import warn
from bench.core.columns import to_cell
from bench.core.config.configuration import Configuration, Flag
from bench.core.config.run import OUTPUT
from bench.core.errors import UsageError
from bench.core.run_folder import RUNS_FOLDER
from bench.core.schema import METRICS
from bench.report import comparison, groups, store, verdict
from bench.report.columns import ALL, COLUMNS_BY_NAME, find_numbers
from bench.report.comparison_table import answer_table, comparison_table, only_columns, shared_settings
from bench.report.quality import quality_of
from bench.report.statistics import SeedRule
from bench.report.store import frame
from bench.report.tables import Table, records

if TYPE_CHECKING:
    import pandas as pd

MEANING, INPUT, GATES = "Meaning", "Input", "Gates"


def texts(given: Any) -> tuple[str, ...]:
    """Split a value, or each value of a list, at commas, and return all parts as texts."""
    items = [] if given is None else [given] if isinstance(given, str | int | float) else given
    return tuple(part.strip() for item in items for part in str(item).split(","))


def _conditions(given: Any) -> tuple[str, ...]:
    # Do not split at commas, because they also separate the options of a component in a condition.
    if isinstance(given, Mapping):
        return tuple(f"{name}={to_cell(value)}" for name, value in given.items())
    return (given,) if isinstance(given, str) else tuple(given or ())


Texts = Annotated[tuple[str, ...], BeforeValidator(texts)]


def _meanings(*, comparable: bool = False) -> dict[str, str]:
    return {each.name: each.meaning for each in COLUMNS_BY_NAME.values() if each.better or not comparable}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig(Configuration):
    """The options of `bench compare` and of `bench.compare`: which rows are compared, in which metric, and how."""

    panels: ClassVar[tuple[str, ...]] = (MEANING, INPUT, OUTPUT, GATES)

    baseline: Annotated[
        str | None,
        Doc("row that the others are compared with: a compressor, COMPRESSOR+COLLECTIVE, or a run's name"),
        Flag(MEANING, metavar="SPEC", chosen="none on native, else bf16; if the metric is a speed: bf16, else none"),
    ] = None
    metric: Annotated[
        str | None,
        Doc("column that the verdict is about, or bytes_to_target"),
        Flag(
            MEANING,
            metavar="COLUMN",
            chosen="samples_per_s; with --target, time_to_target_s; for runs too short to be timed, test_accuracy or "
            "test_bits_per_byte",
            words=lambda: _meanings(comparable=True),
        ),
    ] = None
    target: Annotated[
        Texts,
        Doc(
            "accuracies to reach, separated by commas: 0.9, or best-1 for one point below the baseline's mean final "
            "accuracy; for a text bits per byte: 2.1, or best-1 for 1 % above the baseline's"
        ),
        Flag(MEANING, metavar="TARGETS", chosen="the target of each run"),
    ] = ()
    rule: Annotated[
        SeedRule,
        Doc(
            "how seeds were chosen; fixed: their number was chosen before the first run, anytime: seeds were added "
            "until the result was clear, and only seeds that both rows have are compared"
        ),
        Flag(MEANING),
    ] = "fixed"
    by: Annotated[
        Texts,
        Doc("group by these columns, separated by commas"),
        Flag(
            MEANING,
            metavar="COLUMNS",
            chosen="everything but the seed",
            words=lambda: {column.name: column.meaning for column in METRICS},
        ),
    ] = ()
    where: Annotated[
        tuple[str, ...],
        BeforeValidator(_conditions),
        Doc(
            "use only runs with these values: 'dataset=digits,world_size=4' ('steps=-': an empty cell). A component's "
            "name without options matches any options; an item that names an option of the component before it belongs "
            "to that component"
        ),
        Flag(INPUT, metavar="COLUMN=VALUE"),
    ] = ()
    keep_going: Annotated[
        bool,
        Doc("skip, with a warning, paths that do not exist, and files that cannot be read or that bench did not write"),
        Flag(INPUT, name="--keep-going"),
    ] = False
    sort: Annotated[
        str | None,
        Doc("order the rows by this column, or by bytes_to_target, best first"),
        Flag(OUTPUT, metavar="COLUMN", chosen="in the order of the files", words=_meanings),
    ] = None
    extra_columns: Annotated[
        Texts,
        Doc(
            "also show these columns, separated by commas; step: the parts of a step's time; all: every column, with "
            "intervals, as in JSON"
        ),
        Flag(OUTPUT, name="--columns", metavar="COLUMNS", words=lambda: _meanings(comparable=True)),
    ] = ()
    only_columns: Annotated[
        Texts,
        Doc("show only these columns after the names, in this order: gain, verdict, ..., as they are called in JSON"),
        Flag(OUTPUT, metavar="COLUMNS", chosen="those of the terminal", words=lambda: _meanings(comparable=True)),
    ] = ()

    @property
    def extra(self) -> list[str]:
        """The names of the further columns to show.

        Raises:
            UsageError: a column does not exist, or holds no numbers.
        """
        return find_numbers([name for name in self.extra_columns if name != ALL])

    @property
    def conditions(self) -> list[groups.Condition]:
        """The conditions that runs must meet."""
        return [condition for text in self.where for condition in groups.parse_conditions(text)]

    def compared(self, paths: Sequence[str | Path]) -> tuple[list[store.Row], comparison.Comparison]:
        """Return the rows in files and folders, and the comparison of their runs."""
        rows = store.read(paths, keep_going=self.keep_going, warn=warn)
        are_timed = any(row["samples_per_s"] is not None for row in rows)
        measured = "samples_per_s" if are_timed else quality_of(rows).column
        return rows, comparison.compare(
            rows,
            baseline=self.baseline,
            metric=self.metric or ("time_to_target_s" if self.target else measured),
            by=self.by,
            where=self.conditions,
            targets=self.target,
            sort=self.sort,
            rule=self.rule,
        )

    def table(
        self, compared: comparison.Comparison, *, cautions: Sequence[str] = (), is_complete: bool = False
    ) -> Table:
        """Return the table of a comparison with the chosen columns.

        Args:
            compared: the comparison.
            cautions: warnings to show above the table.
            is_complete: True for every column, False for those of the terminal, if the options choose none.

        Raises:
            UsageError: a column does not exist, or holds no numbers.
        """
        if self.only_columns:
            if self.extra_columns:
                raise UsageError("--columns adds columns and --only-columns chooses all of them; give one of the two")
            return only_columns(compared, self.only_columns, cautions=cautions)
        build = comparison_table if is_complete or ALL in self.extra_columns else answer_table
        return build(compared, extra=self.extra, cautions=cautions)


def load(paths: str | Path | Sequence[str | Path] = RUNS_FOLDER, *, keep_going: bool = False) -> pd.DataFrame:
    """Return the rows of runs: one per evaluation, and one at the end of every run.

    Columns of whole numbers, flags and texts have nullable dtypes (``Int64``, ``boolean``, ``string``); all other
    numbers are ``float64``. An empty cell is NA or NaN.

    Args:
        paths: run folders, folders of runs, CSV files, or patterns of these.
        keep_going: skip, with a warning on stderr, paths that do not exist and files that cannot be used.

    Raises:
        UsageError: a file was not written by `bench`.
        NothingToCompare: a path does not exist, or no path leads to a readable row.
    """
    rows = store.read(listed(paths), keep_going=keep_going)
    return frame(rows, {column.name: column.type for column in METRICS})


@takes_options(CompareConfig)
def compare(
    paths: str | Path | Sequence[str | Path] = RUNS_FOLDER, *, quiet: bool = False, **options: Any
) -> pd.DataFrame:
    """Compare runs with a baseline like `bench compare`.

    Args:
        paths: run folders, folders of runs, CSV files, or patterns of these.
        quiet: do not print the comparison's warnings on stderr.
        options: the options of `bench compare` that `CompareConfig` declares. An option that the command takes several
            times may be a list, `target` may be a number, and `where` a dictionary: ``{"dataset": "digits"}``.

    Returns:
        One row per configuration, the baseline first, with the columns of ``bench compare --json``. ``gain`` is
        the factor by which the row is better than the baseline in the metric (above 1: better); ``gain_low`` and
        ``gain_high`` are its 95 % interval; ``verdict`` is the conclusion that the seeds allow. ``accuracy_difference``
        is a share; for a text, ``bits_per_byte_difference`` is relative to the baseline. ``attrs`` of the table holds
        the ``verdict`` in sentences, the ``warnings``, and the metric, baseline and settings.

    Raises:
        UsageError: an option, a column or the baseline is unknown, or a target cannot be read.
        NothingToCompare: there is no readable row, or no run meets the conditions.
    """
    config = CompareConfig(**by_option_name(options, compare, keywords_of(CompareConfig)))
    _, compared = config.compared(listed(paths))
    cautions, caveats = list(verdict.cautions(compared)), list(verdict.caveats(compared))
    table = config.table(compared, cautions=cautions, is_complete=True)
    rows = records(table)
    names = dict.fromkeys(name for row in rows for name in row)
    found = frame(rows, {name: _type_of([row.get(name) for row in rows]) for name in names})
    found.attrs.update(described(table, compared, caveats))
    for sentence in () if quiet else (*cautions, *caveats):
        warn(sentence)
    return found


def described(table: Table, compared: comparison.Comparison, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the data that accompany the rows of a table, by name: metric, baseline, verdict, warnings and so on."""
    return {
        "metric": compared.metric.name,
        "baseline": compared.baseline.title,
        "rule": compared.rule,
        "settings": shared_settings(compared),
        "verdict": list(table.answer),
        "warnings": [*table.cautions, *warnings],
    }


def _type_of(values: Sequence[Any]) -> type:
    """Return the common Python type of values: float if one of them is a float, or if there is no value at all."""
    kinds = {type(value) for value in values if value is not None}
    return float if not kinds or float in kinds else kinds.pop()


def listed(items: str | Path | Sequence[str | Path]) -> list[str | Path]:
    """Return the items, or the only item, as a list."""
    return [items] if isinstance(items, (str, Path)) else list(items)
