"""Select the runs of a comparison (``--where``) and sort its rows (``--sort``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from bench.core.errors import NothingToCompare, UsageError
from bench.core.schema.cells import from_cell
from bench.core.schema.metrics import METRICS_BY_NAME
from bench.report.configurations import COLUMNS_BY_NAME, NOTHING, Configuration, find_column, format_value
from bench.report.store import Row, Run, collect_runs
from bench.report.targets import TO_TARGET, Target, mean_need, needs, num_reached

# Settings that define the work; all other settings define the method.
WORKLOAD = (
    "model", "dataset", "train_size", "test_size", "holdout_size", "batch_size", "epochs", "steps", "target_accuracy",
    "partition", "world_size", "hosts", "ranks_per_host", "replicas", "device", "threads", "uplink_bps", "downlink_bps",
    "link_trace", "latency_s", "jitter_s", "loss_ratio", "cpu_share", "cluster_digest", "straggler",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The rows of one workload.

    Attributes:
        label: the settings that distinguish it from other workloads; empty if it is the only one.
        rows: the rows of its runs.
    """

    label: str
    rows: list[Row]


def by_workload(rows: Sequence[Row]) -> list[Workload]:
    """Return the workloads in order of appearance; a run belongs to the workload of its last row."""
    runs = collect_runs(rows)
    distinguishing = _distinguishing_columns([run.rows[-1] for run in runs])
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        groups.setdefault(tuple(run.rows[-1][name] for name in WORKLOAD), []).extend(run.rows)
    return [
        Workload(
            label=", ".join(f"{name}={format_value(name, group[-1][name])}" for name in distinguishing), rows=group
        )
        for group in groups.values()
    ]


def _distinguishing_columns(rows: Sequence[Row]) -> list[str]:
    """Return the columns that distinguish the workloads, without those that previous columns make redundant."""
    distinguishing: list[str] = []
    num_workloads = 1
    for name in WORKLOAD:
        num_with_it = len({tuple(row[each] for each in (*distinguishing, name)) for row in rows})
        if num_with_it > num_workloads:
            distinguishing, num_workloads = [*distinguishing, name], num_with_it
    return distinguishing


# Names of columns that are also options of some component.
ALSO_OPTIONS = {"collective", "error", "seed", "test_size", "train_size", "warmup_epochs"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
    """A value that a column must have; None: the cell is empty. A component's name alone matches any options."""

    column: str
    value: Any

    def holds(self, run: Run) -> bool:
        """Return True if the run meets the condition."""
        found = run[self.column]
        return bool(found == self.value) or (isinstance(found, str) and found.partition(":")[0] == self.value)


def parse_conditions(text: str) -> list[Condition]:
    """Read conditions such as ``dataset=digits,compressor=topk:ratio=0.01,skip=norm``.

    A part that names no column is an option of the component before it, as is a part that names both a column and an
    option of that component. To mean the column, write its condition before the component.

    Raises:
        UsageError: a part names no column, or its value does not have the column's type.
    """
    parts: list[str] = []
    for part in text.split(","):
        name = part.partition("=")[0].strip()
        is_option = name not in METRICS_BY_NAME or (name in ALSO_OPTIONS and parts and name in _options(parts[-1]))
        if parts and ":" in parts[-1] and is_option:
            parts[-1] += f",{part}"
        else:
            parts.append(part)
    return [_condition(part) for part in parts]


def _options(condition: str) -> Collection[str]:
    """Return the options of the component in a condition like ``compressor=topk:ratio=0.01``; empty if unknown."""
    from bench.core import registry

    column, _, value = condition.partition("=")
    kinds = {each.singular: kind for kind, each in registry.KINDS.items()}
    kind, name = kinds.get(column.strip()), value.partition(":")[0].strip()
    if kind is None or name not in registry.entries(kind):
        return ()
    return registry.load(kind, name).option_names()  # imports torch


def _condition(text: str) -> Condition:
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise UsageError(f"'{text}' is not a condition; write --where COLUMN=VALUE, such as dataset=digits")
    column = find_column(name)
    try:  # tables show an empty cell as NOTHING
        return Condition(column=column.name, value=from_cell("" if value == NOTHING else value, column.type))
    except ValueError as error:
        raise UsageError(f"--where {text}: {error}") from None


def select(runs: Sequence[Run], conditions: Sequence[Condition]) -> list[Run]:
    """Return the runs that meet every condition.

    Raises:
        NothingToCompare: no run meets a condition; the message lists the values that exist.
    """
    kept = list(runs)
    for condition in conditions:
        found = dict.fromkeys(run[condition.column] for run in kept)
        kept = [run for run in kept if condition.holds(run)]
        if not kept:
            listing = ", ".join(format_value(condition.column, value) for value in found)
            raise NothingToCompare(
                f"no run has {condition.column} {format_value(condition.column, condition.value)}; there are: {listing}"
            )
    return kept


def in_order_of(name: str | None, candidates: Sequence[Configuration], target: Target) -> list[Configuration]:
    """Sort the candidates by a column, the best first, or ascending if the column has no better direction.

    Candidates without a value come last. Times and bytes to target are sorted by the share of seeds that missed the
    target first.

    Raises:
        UsageError: there is no such column.
    """
    if name is None:
        return list(candidates)
    column = COLUMNS_BY_NAME.get(name) or find_column(name)
    sign = -1.0 if column.better == "higher" else 1.0

    def place(candidate: Configuration) -> tuple[bool, Any]:
        if name in TO_TARGET:
            seeds = needs(candidate, name, target)
            mean = mean_need(seeds)
            return mean is None, (1 - num_reached(seeds) / len(seeds), mean.mean) if mean else None
        mean = candidate.estimate(name) if column.better else None
        value = sign * mean.mean if mean else next(iter(candidate.distinct(name)), None)
        return value is None, value

    return sorted(candidates, key=place)
