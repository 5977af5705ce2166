"""Find jobs whose launcher was killed, and clean up after them when the next command starts.

A running job has a note in a folder in the user's home, and its launcher holds a lock on the note. The kernel releases
the lock when the launcher ends, even if it is killed, so a note that can be locked belongs to a dead launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from bench.core.errors import BenchError
from bench.core.run_folder import RunFolder


def noted(command: str, folder: Path) -> AbstractContextManager[object]:
    """Keep a note of a job's folder while the block runs; do nothing if no note can be written.

    Args:
        command: "run", whose folder is kept, or another command, whose folder is temporary.
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
    """Clean up after every job whose launcher was killed, and name the job on stderr."""
    try:
        paths = sorted(_notes().glob("*"))
    except RuntimeError:  # the user has no home, and so no notes
        return
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as note:  # its job may end meanwhile
            if _is_left(path, note.fileno()) and (text := note.read()):
                if job := _job_in(text):
                    _clear_away(*job)
                else:
                    print(f"note: {path} is not a note of a job and is removed", file=sys.stderr)
                path.unlink()


def _is_left(path: Path, note: int) -> bool:
    try:
        fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its launcher is alive, or another command is cleaning up
        return False
    return path.exists()


def _job_in(text: bytes) -> tuple[str, str] | None:
    """Return the command and folder in a note, or None if it is damaged."""
    try:
        note = json.loads(text)
        return str(note["command"]), str(note["path"])
    except (ValueError, TypeError, KeyError):
        return None


def _clear_away(command: str, path: str) -> None:
    folder = RunFolder(Path(path))
    if not folder.path.exists() or folder.status.exists():  # already removed, or the job had ended
        return
    if command == "run" and not any(inside.is_file() for inside in folder.path.rglob("*")):
        shutil.rmtree(path, ignore_errors=True)
        print(f"note: bench was killed before a run started; its empty folder {path} is removed", file=sys.stderr)
    elif command == "run":
        print(f"note: bench was killed during an earlier run; {_record_death(folder)} in {path}", file=sys.stderr)
    else:
        shutil.rmtree(path, ignore_errors=True)
        print(f"note: `bench {command}` was killed earlier; its temporary folder {path} is removed", file=sys.stderr)


def _record_death(folder: RunFolder) -> str:
    from bench.core.config.run import RunConfig
    from bench.launch.jobs.ending import record_ending

    try:
        record_ending(RunConfig.from_json(folder.config), folder, "interrupted", "bench was killed")
    except (OSError, BenchError) as error:
        return f"a last row that says so could not be written ({error})"
    return "its rows so far are kept"


def _notes() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gradwire" / "jobs"
