"""Group runs into configurations, the rows of a comparison, each with a label that distinguishes it from the others."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.core.errors import UsageError
from bench.core.schema.column import Column
from bench.core.schema.metrics import METRICS, METRICS_BY_NAME
from bench.core.units import format_bytes, format_rate, format_seconds
from bench.report.statistics import Estimate, estimate
from bench.report.store import Run

NOTHING = "-"
_SHA_DIGITS = 10  # enough to distinguish commits

_BY_UNIT = {"s": format_seconds, "bytes": format_bytes, "bit/s": format_rate}


def format_value(column: str, value: Any) -> str:
    """Format a value of the named column, with a scaled unit for times, bytes and rates; ``-`` if there is no value."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        known = COLUMNS_BY_NAME.get(column)
        return _BY_UNIT.get(known.unit if known else "", format_number)(value)
    return str(value)[:_SHA_DIGITS] if column == "git_sha" else str(value)


def format_number(value: float) -> str:
    """Format with four significant digits, or as an integer from 1000 on: ``15770``, ``12.34``, ``0.05``."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def format_bound(column: str, bound: float, mean_text: str) -> str:
    """Format a bound of an interval, with as many decimals as its mean if both have the same unit."""
    text = format_value(column, bound)
    decimals = len(mean_text.partition(".")[2])
    return f"{bound:.{decimals}f}" if text == format_number(bound) and _is_number(mean_text) else text


def format_interval(text: str, low: str | None, high: str | None) -> str:
    """Return ``1.31x [1.22, 1.40]``, or the text alone if there is no interval."""
    return text if low is None or high is None else f"{text} [{low}, {high}]"


def format_factor(factor: float) -> str:
    """Format a factor with three digits: ``1.31``, ``12.3``, ``482``."""
    return f"{factor:.{2 if factor < 10 else 1 if factor < 100 else 0}f}"


def format_points(share: float) -> str:
    """Format a difference of shares in percentage points, with its sign: ``-0.004`` -> ``-0.4``."""
    points = f"{share * 100:+.1f}"
    return "0.0" if points in ("+0.0", "-0.0") else points


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).lstrip("-").isdecimal()


BYTES_TO_TARGET = Column(
    "quality",
    "bytes_to_target",
    float,
    "bytes of gradients and optimizer state that a rank sent until the target; computed, not in any file",
    unit="bytes",
    better="lower",
)

# The columns of metrics.csv and those computed from them.
COLUMNS_BY_NAME: Mapping[str, Column] = {**METRICS_BY_NAME, BYTES_TO_TARGET.name: BYTES_TO_TARGET}

ALL = "all"  # stands for every column of a comparison
STEP = ("forward_backward_s", "encode_s", "exchange_s", "exposed_s")  # the parts of a step


def find_column(name: str) -> Column:
    """Return the column of metrics.csv with this name.

    Raises:
        UsageError: there is none; the message names the most similar one.
    """
    if name not in METRICS_BY_NAME:
        from collectives.options import did_you_mean  # imported only here, because it imports pydantic

        raise UsageError(
            f"there is no column '{name}'{did_you_mean(name, METRICS_BY_NAME)}; docs/columns.md explains every column"
        )
    return METRICS_BY_NAME[name]


def find_metric(name: str) -> Column:
    """Return the column with this name, if a higher or a lower value of it is better.

    Raises:
        UsageError: there is no such column, or neither direction is better.
    """
    column = COLUMNS_BY_NAME.get(name) or find_column(name)
    if not column.better:
        raise UsageError(f"{name} cannot be compared: neither more nor less of it is better; try samples_per_s")
    return column


def find_numbers(names: Sequence[str]) -> list[str]:
    """Return the names of columns with a mean; ``step`` is expanded to the parts of a step.

    Raises:
        UsageError: there is no such column, or it holds no numbers.
    """
    found: list[str] = []
    for name in names:
        if name == "step":
            found += STEP
        elif name == BYTES_TO_TARGET.name or find_column(name).type in (int, float):
            found.append(name)
        else:
            raise UsageError(f"{name} holds no numbers, so it has no mean to show; --by {name} groups by it")
    return found


_ALWAYS = ["compressor", "collective"]
_SPECS = [*_ALWAYS, "strategy"]
DENSE = ("none", "bf16", "fp16", "torch_bf16", "torch_fp16")  # compressors that send every element in 16 or 32 bits
_NO_SETTING = {"run_id", "digest", "config_id", "name", "seed", "rates_tried"}
# Columns that say how a run was set up, except the seed and labels.
SETTINGS = [column.name for column in METRICS if column.group == "identity" and column.name not in _NO_SETTING]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """One row of a comparison: one configuration, or one group of ``--by``.

    Attributes:
        label: the columns in which rows may differ, with this row's values.
        named_by: the columns of the label that are needed to distinguish the rows; None: all.
        short: the shortest unique name, such as ``topk``.
        runs: one run per seed (``runs.one_per_seed``).
    """

    label: dict[str, Any]
    named_by: Sequence[str] | None = None
    short: str = ""
    runs: list[Run]

    @property
    def title(self) -> str:
        """A text that distinguishes the row from the others, such as ``topk:ratio=0.01 + allgather, lr=0.1``."""
        is_whole = self.named_by is not None and self.label.keys() >= set(self.named_by)
        return self.named(self.named_by if self.named_by is not None and is_whole else self.label)

    def named(self, columns: Iterable[str]) -> str:
        """Return the values of these columns of the label in one text."""
        return _name(self.label, columns)

    @functools.cached_property
    def ok(self) -> list[Run]:
        """The successful runs: only their figures count."""
        return [run for run in self.runs if run.ended_well]

    @functools.cached_property
    def diverged(self) -> list[Run]:
        """The runs whose training diverged; they have no final accuracy."""
        return [run for run in self.runs if run.diverged]

    @property
    def is_dense(self) -> bool:
        """True if all runs send every element in 16 or 32 bits."""
        return all(run["compressor"].partition(":")[0] in DENSE for run in self.runs)

    def values(self, column: str) -> list[float]:
        """Return the known values of a column, one per successful run."""
        return [float(value) for value in (_measured(run, column) for run in self.ok) if value is not None]

    def estimate(self, column: str) -> Estimate | None:
        """Return the mean over seeds with its interval, or None if no seed has a value."""
        return estimate(self.values(column))

    def distinct(self, column: str) -> list[Any]:
        """Return the distinct known values of a column over all runs, in order of appearance."""
        return [value for value in dict.fromkeys(run[column] for run in self.runs) if value is not None]


def _measured(run: Run, column: str) -> Any:
    """Return a run's value, or None if two timers contradict each other, as in rows of older versions."""
    if column == "exposed_s" and None not in (run[column], run["step_time_s"]) and run[column] > run["step_time_s"]:
        return None
    return run[column]


def configurations(runs: Sequence[Run], by: Sequence[str]) -> list[Configuration]:
    """Group runs into the rows of a comparison, in order of appearance.

    Args:
        runs: one per configuration and seed.
        by: columns to group by; empty: group by ``config_id`` and label by compressor, collective, the strategy if any
            run has an unusual one, and every setting that differs between runs.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in by or ["config_id"]), []).append(run)
    names = list(by) or _distinguishing_columns(runs, list(groups.values()))
    labels = [{name: group[0][name] for name in names} for group in groups.values()]
    needed = list(by) or _needed(labels)
    return [
        Configuration(label=label, named_by=needed, short=short, runs=group)
        for label, short, group in zip(labels, _short_names(labels, needed), groups.values(), strict=True)
    ]


def _name(label: Mapping[str, Any], names: Iterable[str], *, with_options: bool = True) -> str:
    values = {name: format_value(name, label[name]) for name in names}
    specs = " + ".join(
        value if with_options else value.partition(":")[0] for name, value in values.items() if name in _SPECS
    )
    others = [f"{name}={value}" for name, value in values.items() if name not in _SPECS]
    return ", ".join([specs, *others] if specs else others)


def _needed(labels: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns that distinguish all labels: the components, and others where these are not enough."""
    needed: list[str] = []
    num_apart = 0
    for name in labels[0] if labels else ():
        apart = len({tuple(label[each] for each in [*needed, name]) for label in labels})
        if name in _SPECS or apart > num_apart:
            needed.append(name)
            num_apart = apart
    return needed


def _short_names(labels: Sequence[Mapping[str, Any]], needed: Sequence[str]) -> list[str]:
    """Return each label's first unique name among: compressor, components, settings, or all of these."""
    settings = [name for name in needed if name not in _SPECS]
    components = [name for name in needed if name in _SPECS]
    varied = [name for name in components if len({label[name] for label in labels}) > 1]
    choices = (components[:1], components, [] if varied else settings, [*components[:1], *settings], needed)
    forms = [[_name(label, names, with_options=False) for label in labels] for names in choices]
    forms.append([_name(label, needed) for label in labels])
    return [
        next((form[i] for form in forms if form[i] and form.count(form[i]) == 1), forms[-1][i])
        for i in range(len(labels))
    ]


def _distinguishing_columns(runs: Sequence[Run], groups: Sequence[list[Run]]) -> list[str]:
    """Return the columns that distinguish the groups; if settings are not enough, add the name or ``config_id``."""
    unusual = {run["strategy"] for run in runs} - {METRICS_BY_NAME["strategy"].absent, None}
    always = _SPECS if unusual else _ALWAYS
    names = always + [name for name in SETTINGS if name not in always and len({run[name] for run in runs}) > 1]
    for last_resort in ("name", "config_id"):
        if len({tuple(group[0][name] for name in names) for group in groups}) == len(groups):
            break
        if len({run[last_resort] for run in runs}) > 1:
            names.append(last_resort)
    return names
