"""Find the runs in a folder: those that are done, those that failed, and those that were interrupted ("torn")."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from pathlib import Path
from typing import Any, Literal

from bench.core.checkpoints import Checkpoints
from bench.core.locks import locked
from bench.core.run_folder import RunFolder, read_json
from bench.launch.resuming import refusal

State = Literal["torn", "failed", "done"]
_STATES: dict[str, State] = {"ok": "done", "failed": "failed", "timeout": "failed"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastRun:
    """A run that was started before.

    Attributes:
        folder: the run's folder.
        summary: content of `status.json`; empty if there is none.
        resumed: content of `resume.json`; empty if there is none.
    """

    folder: RunFolder
    summary: dict[str, Any]
    resumed: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def state(self) -> State:
        """Done, failed, or torn: the run was interrupted or killed, or is still running."""
        return _STATES.get(self.summary.get("status", ""), "torn")


def past_runs(out: Path, digest: str = "") -> list[PastRun]:
    """Return the runs in a folder, of one digest or all: torn, then failed, then done, each from old to new."""
    folders = [RunFolder(path) for path in sorted(out.glob(f"*-s*-{digest}*")) if path.is_dir()]
    runs = [
        PastRun(folder=folder, summary=read_json(folder.status) or {}, resumed=read_json(folder.resume) or {})
        for folder in folders
        if folder.digest
    ]
    runs = [run for run in runs if "digest_before" not in run.resumed]  # resumed with other ranks
    return sorted(runs, key=lambda run: ("torn", "failed", "done").index(run.state))


def by_digest(runs: list[PastRun]) -> dict[str, PastRun]:
    """Return one run per digest: the newest that is done, else the newest that failed, else the newest that is torn."""
    return {run.folder.digest: run for run in runs}


def take_up(out: Path, digest: str) -> RunFolder | None:
    """Return the newest interrupted or failed run that can be resumed from a checkpoint, or None.

    Remove all other interrupted runs, unless they have a checkpoint that this version cannot use. Failed runs and those
    still running are kept. Print on stderr what is done with each run.
    """
    found: RunFolder | None = None
    for run in sorted(past_runs(out, digest), key=lambda run: run.folder.run_id, reverse=True):
        with locked(run.folder.path) as is_left:
            if not is_left or run.state == "done":
                continue
            reason = refusal(run.folder)
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
