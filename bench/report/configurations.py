"""Configurations: the rows of a comparison, each with the runs behind it and a label that tells it from the others."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from bench.core.schema.metrics import METRICS, METRICS_BY_NAME
from bench.report.formats import format_value
from bench.report.runs import Run
from bench.report.statistics import Estimate, estimate

_ALWAYS = ["compressor", "collective"]
_SPECS = [*_ALWAYS, "strategy"]
DENSE = ("none", "bf16", "fp16", "torch_bf16", "torch_fp16")
"""Compressors that send every element, in 16 bits at least."""
_NO_SETTING = {"run_id", "digest", "config_id", "name", "seed", "rates_tried"}
SETTINGS = [column.name for column in METRICS if column.group == "identity" and column.name not in _NO_SETTING]
"""Columns that say how a run was set up, the seed and labels apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Configuration:
    """What is compared with others: one configuration, or one group of ``--by``.

    Attributes:
        label: the columns that tell it from the others, with their values.
        runs: one per seed (``runs.one_per_seed``).
    """

    label: dict[str, Any]
    runs: list[Run]

    @property
    def title(self) -> str:
        """``topk:ratio=0.01 + allgather, lr=0.1``: the label in one text."""
        specs = " + ".join(format_value(name, value) for name, value in self.label.items() if name in _SPECS)
        others = [f"{name}={format_value(name, value)}" for name, value in self.label.items() if name not in _SPECS]
        return ", ".join([specs, *others] if specs else others)

    @functools.cached_property
    def ok(self) -> list[Run]:
        """The runs that ended well: the only ones whose figures count."""
        return [run for run in self.runs if run.ended_well]

    @functools.cached_property
    def diverged(self) -> list[Run]:
        """The runs that failed as a method fails, for whose accuracy there is no figure."""
        return [run for run in self.runs if run.diverged]

    @property
    def is_dense(self) -> bool:
        """All of its runs send every element, in 16 bits at least."""
        return all(run["compressor"].partition(":")[0] in DENSE for run in self.runs)

    def values(self, column: str) -> list[float]:
        """Return the known values of a column, one per seed that ended well."""
        return [float(value) for value in (_measured(run, column) for run in self.ok) if value is not None]

    def estimate(self, column: str) -> Estimate | None:
        """Mean over seeds with its interval, None where no seed has a value."""
        return estimate(self.values(column))

    def distinct(self, column: str) -> list[Any]:
        """The known values of a column over all runs, each once, in order of appearance."""
        return [value for value in dict.fromkeys(run[column] for run in self.runs) if value is not None]


def _measured(run: Run, column: str) -> Any:
    """Return a run's value; none of two timers that contradict each other, as in rows of older versions."""
    if column == "exposed_s" and None not in (run[column], run["step_time_s"]) and run[column] > run["step_time_s"]:
        return None
    return run[column]


def configurations(runs: Sequence[Run], by: Sequence[str]) -> list[Configuration]:
    """Group runs into the rows of a comparison, in order of appearance.

    Args:
        runs: one per configuration and seed.
        by: columns to group by; empty: by ``config_id``, labelled by compressor, collective, the strategy where one is
            not the usual, and every setting that is not the same in all runs.
    """
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in by or ["config_id"]), []).append(run)
    names = list(by) or _telling_columns(runs, list(groups.values()))
    return [Configuration(label={name: group[0][name] for name in names}, runs=group) for group in groups.values()]


def _telling_columns(runs: Sequence[Run], groups: Sequence[list[Run]]) -> list[str]:
    """Columns that tell the groups apart; what no setting shows (a hidden default), the name or the digest does."""
    unusual = {run["strategy"] for run in runs} - {METRICS_BY_NAME["strategy"].absent, None}
    always = _SPECS if unusual else _ALWAYS
    names = always + [name for name in SETTINGS if name not in always and len({run[name] for run in runs}) > 1]
    for last_resort in ("name", "config_id"):
        if len({tuple(group[0][name] for name in names) for group in groups}) == len(groups):
            break
        if len({run[last_resort] for run in runs}) > 1:
            names.append(last_resort)
    return names
