"""Collect rows, one per evaluation, into runs, one per configuration and seed."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from bench.core.schema.metrics import METRICS
from bench.report.store import Row, run_key

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
