"""Jobs whose launcher was killed: the next command names them and clears away what they left.

A job under way has a note in a folder of the user's own, and its launcher holds the note's lock. The kernel gives the
lock back when the launcher ends, however that comes about, so a note that can be locked is that of a dead launcher.
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
    """Keep a note of a job's folder while the block runs, where there is a place for notes.

    Args:
        command: run, whose folder is kept, or the name of another command, whose folder is a temporary one.
        folder: the job's.
    """
    try:
        _notes().mkdir(mode=0o700, parents=True, exist_ok=True)
        note = tempfile.NamedTemporaryFile(dir=_notes(), buffering=0)  # noqa: SIM115 - removed when it is closed
        fcntl.flock(note, fcntl.LOCK_EX)
        note.write(json.dumps({"command": command, "path": str(folder.absolute())}).encode())
    except (OSError, RuntimeError):  # the disk is full, or this user has no home: only a kill would leave something
        return contextlib.nullcontext()
    return note


def clear_away() -> None:
    """Name, on stderr, every job whose launcher was killed, and clear away what it left."""
    try:
        paths = sorted(_notes().glob("*"))
    except RuntimeError:  # this user has no home, and so no notes
        return
    for path in paths:
        with contextlib.suppress(FileNotFoundError), path.open("r+b") as note:  # its job may end meanwhile
            if _is_left(path, note.fileno()) and (text := note.read()):
                if job := _job_in(text):
                    _clear_away(*job)
                else:
                    print(f"note: {path} tells of no job and is removed", file=sys.stderr)
                path.unlink()


def _is_left(path: Path, note: int) -> bool:
    try:
        fcntl.flock(note, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # its launcher lives, or another command is at it
        return False
    return path.exists()


def _job_in(text: bytes) -> tuple[str, str] | None:
    """The (command, folder) that a note tells of; None where it is damaged."""
    try:
        told = json.loads(text)
        return str(told["command"]), str(told["path"])
    except (ValueError, TypeError, KeyError):
        return None


def _clear_away(command: str, path: str) -> None:
    folder = RunFolder(Path(path))
    if not folder.path.exists() or folder.status.exists():  # it is cleared away, or it had come to its end
        return
    if command == "run" and not any(inside.is_file() for inside in folder.path.rglob("*")):
        shutil.rmtree(path, ignore_errors=True)
        print(f"note: bench was killed before a run began; its empty folder {path} is removed", file=sys.stderr)
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
