"""Group runs into configurations, the rows of a comparison, each with a label that distinguishes it from the others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.core.schema.metrics import METRICS, METRICS_BY_NAME
from bench.report.formats import format_value
from bench.report.runs import Run
from bench.report.statistics import Estimate, estimate

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
