"""Record a run that failed or was stopped: a last row and `status.json` say how far it came and why it ended."""

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from bench.core import environment
from bench.core.config.run import RunConfig
from bench.core.errors import BenchError
from bench.core.files import locked
from bench.core.rows import RowWriter, read_rows
from bench.core.run_folder import RunFolder, read_json, write_json
from bench.launch.jobs.failure import ProgressReader


def record_ending(
    config: RunConfig, folder: RunFolder, status: str, error: str, wall_time_s: float | None = None
) -> dict[str, Any]:
    """Write the last row of `metrics.csv`, and `status.json`; return the content of `status.json`.

    No process of the run may be left.

    Args:
        config: the run's configuration.
        folder: the run's folder.
        status: "failed", "timeout" or "interrupted".
        error: the reason, in one sentence.
        wall_time_s: duration in seconds of the run's last job, without the jobs before the run was resumed; None if
            the duration is unknown.

    Raises:
        OSError: `status.json` cannot be written.
        StoreError: the row cannot be written.
    """
    shutil.rmtree(folder.rendezvous, ignore_errors=True)
    progress = ProgressReader(folder.progress)
    progress.new_lines()
    known = progress.last if progress.last.get("step") is not None else _last_row_with(folder, "step")
    reached = {key: known.get(key) for key in ("epoch", "step")}
    resumes = (read_json(folder.resume) or {"resumes": 0})["resumes"]
    origin = environment.origin_columns(config.device)
    row = {
        **config.columns(),
        **origin,
        **{key: value for key, value in (read_json(folder.environment) or {}).items() if key in origin},
        **reached,
        "run_id": folder.run_id,
        "resumes": resumes,
        "status": status,
        "error": error,
    }
    summary = {"status": status, "error": error, "run_id": folder.run_id, **reached}
    try:
        if wall_time_s is not None and (last := _last_row_with(folder, "wall_time_s")):
            # The last row holds the duration of earlier jobs of the run, or includes this one.
            before_s: float = last["wall_time_s"]
            is_included = last.get("resumes") == resumes
            wall_time_s = max(before_s, wall_time_s) if is_included else before_s + wall_time_s
        RowWriter(folder.metrics).append(row | {"wall_time_s": wall_time_s})
    finally:
        write_json(folder.status, summary)
    return summary


def _last_row_with(folder: RunFolder, column: str) -> dict[str, Any]:
    """Return the last row of `metrics.csv` in which the column is not empty; an empty dict if there is none."""
    rows = read_rows(folder.metrics) if folder.metrics.is_file() else []
    return next((row for row in reversed(rows) if row.get(column) is not None), {})


def noted(command: str, folder: Path) -> AbstractContextManager[object]:
    """Keep a file that names a job's folder while the block runs, so that `clear_away` finds the job after a kill.

    Do nothing if the file cannot be written.

    Args:
        command: name of the command. The folder of "run" is kept after a kill; those of other commands are temporary.
        folder: the job's folder.
    """
    try:
        _notes().mkdir(mode=0o700, parents=True, exist_ok=True)
        note = tempfile.NamedTemporaryFile(dir=_notes(), buffering=0)  # noqa: SIM115 - removed when it is closed
        fcntl.flock(note, fcntl.LOCK_EX)
        note.write(json.dumps({"command": command, "path": str(folder.absolute())}).encode())
    except (OSError, RuntimeError):  # the disk is full, or the user has no home; then a kill leaves the folder behind
        return contextlib.nullcontext()
    return note


def clear_away() -> None:
    """Clean up after every job whose launcher was killed, and print on stderr what was done."""
    try:
        paths = sorted(_notes().glob("*"))
    except RuntimeError:  # the user has no home, and so no notes
        return
    for path in paths:
        with contextlib.suppress(FileNotFoundError), locked(path) as is_left:  # its job may end meanwhile
            text = path.read_bytes() if is_left else b""
            if not text:  # its launcher is alive, or another command is cleaning up
                continue
            try:
                job = json.loads(text)
                command, folder = str(job["command"]), RunFolder(Path(job["path"]))
            except (ValueError, TypeError, KeyError):
                said = f"{path} is not a note of a job and is removed"
            else:
                said = _clear_away(command, folder)
            if said:
                print(f"note: {said}", file=sys.stderr)
            path.unlink()


def _clear_away(command: str, folder: RunFolder) -> str:
    """Record in a run's folder that `bench` was killed, or remove the folder; return a sentence about what was done.

    The sentence is empty if nothing had to be done.
    """
    path = folder.path
    if not path.exists() or folder.status.exists():  # already removed, or the job had ended
        return ""
    if command == "run" and any(inside.is_file() for inside in path.rglob("*")):
        try:
            record_ending(RunConfig.from_json(folder.config), folder, "interrupted", "bench was killed")
            kept = "its rows so far are kept"
        except (OSError, BenchError) as error:
            kept = f"a last row that says so could not be written ({error})"
        return f"bench was killed during an earlier run; {kept} in {path}"
    shutil.rmtree(path, ignore_errors=True)
    if command == "run":
        return f"bench was killed before a run started; its empty folder {path} is removed"
    return f"`bench {command}` was killed earlier; its temporary folder {path} is removed"


def _notes() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gradwire" / "jobs"
