"""Split rows by workload: the work to be done, not the method. Only methods on the same workload are comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from bench.report.formats import format_value
from bench.report.runs import collect_runs
from bench.report.store import Row

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
