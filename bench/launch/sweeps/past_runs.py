"""The runs that lie in a folder: which are done, which failed, and which were cut short and left torn."""

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
    """A run that was begun.

    Attributes:
        folder: where it lies.
        summary: what `status.json` holds; empty where there is none.
        resumed: what `resume.json` holds, likewise.
    """

    folder: RunFolder
    summary: dict[str, Any]
    resumed: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def state(self) -> State:
        """Done or failed; torn: it was interrupted, killed, or is still under way."""
        return _STATES.get(self.summary.get("status", ""), "torn")


def past_runs(out: Path, digest: str = "") -> list[PastRun]:
    """The runs in a folder, of one digest or of all: torn ones first, then failed ones, from old to new."""
    folders = [RunFolder(path) for path in sorted(out.glob(f"*-s*-{digest}*")) if path.is_dir()]
    runs = [
        PastRun(folder=folder, summary=read_json(folder.status) or {}, resumed=read_json(folder.resume) or {})
        for folder in folders
        if folder.digest
    ]
    runs = [run for run in runs if "digest_before" not in run.resumed]  # it went on as another one, with other ranks
    return sorted(runs, key=lambda run: ("torn", "failed", "done").index(run.state))


def by_digest(runs: list[PastRun]) -> dict[str, PastRun]:
    """The run that stands for each digest: the newest one that is done, else that failed, else that is torn."""
    return {run.folder.digest: run for run in runs}


def take_up(out: Path, digest: str) -> RunFolder | None:
    """The newest run that was cut short or failed, and can go on from a checkpoint; None where there is none.

    Others that were cut short are removed, but for those with a checkpoint that cannot be used here, another version's
    say; others that failed stay, as does what is still under way; what becomes of a run is said on stderr.
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
                print(f"note: {found.path} {ended}; it goes on from step {step}", file=sys.stderr)
            elif run.state == "torn" and reason and Checkpoints(run.folder).steps():
                print(f"note: {reason}; its folder stays", file=sys.stderr)
            elif run.state == "torn":
                shutil.rmtree(run.folder.path)
                print(f"note: {run.folder.path} was cut short; it is removed and run again", file=sys.stderr)
    return found
