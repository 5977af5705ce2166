"""Find the runs in a folder: runs that are done, runs that failed, and runs that were interrupted ("torn")."""

import dataclasses
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from bench.core.checkpoints import Checkpoints
from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed, UsageError
from bench.core.files import locked
from bench.core.run_folder import RunFolder, read_json
from bench.launch.run import obstacle_to_resuming
from bench.launch.sweep_file import PlannedRun

PastState = Literal["torn", "failed", "done"]
_STATES: dict[str, PastState] = {"ok": "done", "failed": "failed", "timeout": "failed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that was started earlier.

    Attributes:
        folder: the run's folder.
        summary: content of `status.json`; empty if there is no such file.
        resumed: content of `resume.json`; empty if there is no such file.
    """

    folder: RunFolder
    summary: dict[str, Any]
    resumed: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def state(self) -> PastState:
        """Return "done", "failed", or "torn": the run was interrupted or killed, or is still running."""
        return _STATES.get(self.summary.get("status", ""), "torn")


def past_runs(out: Path, digest: str = "") -> list[PastRun]:
    """Return the runs in a folder: first torn runs, then failed runs, then done runs; each group from old to new.

    Runs that were resumed with another number of ranks are left out.

    Args:
        out: the folder.
        digest: digest of the runs' configuration; empty for all runs.
    """
    folders = [RunFolder(path) for path in sorted(out.glob(f"*-s*-{digest}*")) if path.is_dir()]
    runs = [
        PastRun(folder=folder, summary=read_json(folder.status) or {}, resumed=read_json(folder.resume) or {})
        for folder in folders
        if folder.digest
    ]
    runs = [run for run in runs if "digest_before" not in run.resumed]  # resumed with another number of ranks
    return sorted(runs, key=lambda run: ("torn", "failed", "done").index(run.state))


def by_digest(runs: list[PastRun]) -> dict[str, PastRun]:
    """Return one run per configuration, by digest: the newest done run, else the newest failed one, else the newest.

    Args:
        runs: runs in the order of `past_runs`.
    """
    return {run.folder.digest: run for run in runs}


def take_up(out: Path, digest: str) -> RunFolder | None:
    """Return the folder of the newest interrupted or failed run that can be resumed; None if there is no such run.

    Other interrupted runs are removed, unless they have a checkpoint that this version cannot use. Other failed runs
    and runs that are still running are kept. Notes on stderr say which runs are resumed, removed or kept.

    Args:
        out: folder of the runs.
        digest: digest of the runs' configuration.
    """
    found: RunFolder | None = None
    for run in sorted(past_runs(out, digest), key=lambda run: run.folder.run_id, reverse=True):
        with locked(run.folder.path) as is_left:
            if not is_left or run.state == "done":
                continue
            reason = obstacle_to_resuming(run.folder)
            if not (found or reason):
                found = run.folder
                ended = "failed" if run.state == "failed" else "was cut short"
                step = Checkpoints(found).steps()[0]
                print(f"note: {found.path} {ended}; it is resumed from step {step}", file=sys.stderr)
            elif run.state == "torn" and reason and Checkpoints(run.folder).steps():
                print(f"note: {reason}; its folder is kept", file=sys.stderr)
            elif run.state == "torn":
                shutil.rmtree(run.folder.path)
                print(f"note: {run.folder.path} was cut short; it is removed and run again", file=sys.stderr)
    return found


def expected_s(durations: Mapping[str, list[float]], configs: Iterable[RunConfig]) -> float | None:
    """Return the expected duration of all of these runs together, in seconds, or None if no duration is known.

    The expected duration of a run is the mean of its configuration's durations, or of all durations if its
    configuration has none.

    Args:
        durations: seconds of finished runs, by `config_id` (the same for all seeds).
        configs: the runs.
    """
    if not durations:
        return None
    average = statistics.fmean(seconds for known in durations.values() for seconds in known)
    return sum(statistics.fmean(durations.get(config.config_id, [average])) for config in configs)


_LOCKS = ".locks"


def run_missing(
    configs: Iterable[RunConfig],
    out: Path,
    seen: Mapping[str, PastRun],
    train: Callable[[RunConfig, RunFolder | None], None],
) -> None:
    """Execute runs in order, each once; skip runs that another sweep is executing, and wait for them at the end.

    Args:
        configs: configurations of the runs. Each run is missing in `seen`, or it failed and is to be executed again.
        out: folder of the runs.
        seen: runs that the folder held when `configs` were chosen, by the digest of their configuration.
        train: executes one run, or resumes the run in the given folder; its exceptions end the sweep.

    Raises:
        UsageError: `out` cannot be written.
    """
    locks = out / _LOCKS
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot write results to {out}: {error.strerror or error}; choose another folder with --out"
        ) from None

    def is_settled(config: RunConfig, *, wait: bool) -> bool:
        lock = locks / config.digest
        lock.touch()
        with locked(lock, wait=wait) as is_held:
            if is_held and _is_missing(out, config.digest, seen):
                train(config, take_up(out, config.digest))
        return is_held

    elsewhere = [config for config in configs if not is_settled(config, wait=False)]
    for config in elsewhere:
        is_settled(config, wait=True)


def _is_missing(out: Path, digest: str, seen: Mapping[str, PastRun]) -> bool:
    """Return True if no sweep has finished the run since `seen` was read."""
    now = by_digest(past_runs(out, digest)).get(digest)
    if now is None or now.state == "torn":
        return True
    # A run that had failed is missing, unless it was executed again: in a new folder, or resumed in its old folder.
    before = seen.get(digest)
    return (
        before is not None
        and before.state == "failed"
        and (before.folder.path, before.resumed) == (now.folder.path, now.resumed)
    )


Progress = Literal["missing", "failed", "done"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepState:
    """The runs of a sweep, and which of them are in the sweep's folder.

    Attributes:
        runs: all runs of the sweep, in order.
        out: folder of the runs.
        past: runs that were in the folder when the folder was read, by the digest of their configuration.
        unrecorded: errors of failed runs that could not be written to the folder, by the digest of the configuration.
    """

    runs: list[PlannedRun]
    out: Path
    past: dict[str, PastRun]
    unrecorded: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def look_up(cls, runs: list[PlannedRun], out: Path) -> Self:
        """Read the folder of a sweep's runs and return the state of the sweep."""
        return cls(runs=runs, out=out, past=by_digest(past_runs(out)))

    def progress(self, run: PlannedRun) -> Progress:
        """Return "missing", "failed" or "done" for a run of the sweep; an interrupted run is missing."""
        past = self.past.get(run.config.digest)
        return "missing" if past is None or past.state == "torn" else past.state

    def runs_with_status(self, progress: Progress) -> list[PlannedRun]:
        """Return the runs of the sweep that are missing, failed or done, in order."""
        return [run for run in self.runs if self.progress(run) == progress]

    def to_do(self, *, retry_failed: bool, limit: int | None = None) -> list[RunConfig]:
        """Return the configurations of the runs to execute now.

        Args:
            retry_failed: True to include runs that failed.
            limit: largest number of runs; None for all.
        """
        wanted = ("missing", "failed") if retry_failed else ("missing",)
        return [run.config for run in self.runs if self.progress(run) in wanted][:limit]

    def raise_failures(self, again: str) -> None:
        """Raise an error if any run failed.

        Args:
            again: end of the message, such as "--retry-failed runs them again".

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

    def durations(self) -> dict[str, list[float]]:
        """Return the durations in seconds of the runs that are done, by `config_id` (the same for all seeds)."""
        known: dict[str, list[float]] = {}
        for run in self.runs_with_status("done"):
            if (seconds := self.past[run.config.digest].summary.get("wall_time_s")) is not None:
                known.setdefault(run.config.config_id, []).append(seconds)
        return known
