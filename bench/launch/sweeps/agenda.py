"""SweepState, which says which runs of a sweep are done, which failed, and which are still missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed
from bench.launch.sweeps.estimate import Estimate
from bench.launch.sweeps.past_runs import PastRun, by_digest, past_runs
from bench.launch.sweeps.plan import PlannedRun

Progress = Literal["missing", "failed", "done"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepState:
    """The runs of a sweep, and what its folder held when it was read.

    Attributes:
        runs: all runs of the sweep, in order.
        out: folder of the runs.
        past: runs found in the folder, by digest.
        unrecorded: errors of failed runs that could not be written to the folder, by digest.
    """

    runs: list[PlannedRun]
    out: Path
    past: dict[str, PastRun]
    unrecorded: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def look_up(cls, runs: list[PlannedRun], out: Path) -> Self:
        """Read the folder and return the current state."""
        return cls(runs=runs, out=out, past=by_digest(past_runs(out)))

    def progress(self, run: PlannedRun) -> Progress:
        """Return whether a run is missing, failed or done; interrupted runs are missing."""
        past = self.past.get(run.config.digest)
        return "missing" if past is None or past.state == "torn" else past.state

    def runs_with_status(self, progress: Progress) -> list[PlannedRun]:
        """Return the runs with this progress, in order."""
        return [run for run in self.runs if self.progress(run) == progress]

    def to_do(self, *, retry_failed: bool, limit: int | None = None) -> list[RunConfig]:
        """Return the configurations of the runs to execute now.

        Args:
            retry_failed: include runs that failed.
            limit: largest number of runs; None: all.
        """
        wanted = ("missing", "failed") if retry_failed else ("missing",)
        return [run.config for run in self.runs if self.progress(run) in wanted][:limit]

    def raise_failures(self, again: str) -> None:
        """Raise an error if any run failed.

        Args:
            again: end of the message, which says how to execute failed runs again.

        Raises:
            RunFailed: "2 of 6 runs failed, one of them with: ...; its logs are in ..., and --retry-failed runs them
                again".
        """
        failed = self.runs_with_status("failed")
        counted = f"{len(failed) + len(self.unrecorded)} of {len(self.runs)} runs failed, one of them with"
        if failed:
            first = self.past[failed[0].config.digest]
            raise RunFailed(f"{counted}: {first.summary['error']}; its logs are in {first.folder.path}, and {again}")
        if self.unrecorded:
            raise RunFailed(f"{counted}: {next(iter(self.unrecorded.values()))}")

    def estimate(self) -> Estimate:
        """Return an estimate of durations, from the runs that are done."""
        estimate = Estimate()
        for run in self.runs_with_status("done"):
            estimate.learn(run.config, self.past[run.config.digest].summary.get("wall_time_s"))
        return estimate

    def as_data(self) -> list[dict[str, Any]]:
        """Return one entry per run, for JSON."""
        return [
            {
                "index": index,
                "settings": run.settings,
                "seed": run.config.seed,
                "digest": run.config.digest,
                "config_id": run.config.config_id,
                "status": self.progress(run),
                "folder": str(self.past[run.config.digest].folder.path) if self.progress(run) != "missing" else None,
            }
            for index, run in enumerate(self.runs)
        ]
