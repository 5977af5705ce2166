"""Workloads: what has to be done, apart from how it is done; only methods on the same workload are comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.report.formats import format_value
from bench.report.runs import collect_runs
from bench.report.store import Row

WORKLOAD = (
    "model", "dataset", "train_size", "test_size", "holdout_size", "batch_size", "epochs", "steps", "target_accuracy",
    "partition", "world_size", "hosts", "ranks_per_host", "replicas", "device", "threads", "uplink_bps", "downlink_bps",
    "link_trace", "latency_s", "jitter_s", "loss_ratio", "cpu_share", "cluster_digest", "straggler",
)  # fmt: skip
"""Settings that say what has to be done; all others say how it is done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """The rows of one workload.

    Attributes:
        label: what tells it from the others, empty where it is the only one.
        rows: its rows.
    """

    label: str
    rows: list[Row]


def by_workload(rows: Sequence[Row]) -> list[Workload]:
    """The rows of each workload, in order of appearance; all of a run are of what it did in the end."""
    runs = collect_runs(rows)
    telling = _telling_columns([run.rows[-1] for run in runs])
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        groups.setdefault(tuple(run.rows[-1][name] for name in WORKLOAD), []).extend(run.rows)
    return [
        Workload(label=", ".join(f"{name}={format_value(name, group[-1][name])}" for name in telling), rows=group)
        for group in groups.values()
    ]


def _telling_columns(rows: Sequence[Row]) -> list[str]:
    """Columns that tell the workloads apart; one that says no more than those before it is left out."""
    telling: list[str] = []
    told = 1
    for name in WORKLOAD:
        told_with_it = len({tuple(row[each] for each in (*telling, name)) for row in rows})
        if told_with_it > told:
            telling, told = [*telling, name], told_with_it
    return telling
