"""Check, find and create files and folders that a user names.

Pipes and devices are refused before they are opened, because reading or writing one might never end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from bench.core.errors import UsageError


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold an exclusive lock while the block runs; yield whether it is held.

    Args:
        path: the file or folder, which must exist.
        wait: wait until the lock is free. Without it, the block runs in any case and learns whether the lock is held.

    Raises:
        UsageError: the file system does not support locks.
    """
    # Some network file systems lock only files opened for writing; a folder cannot be opened so.
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        yield _take(path, descriptor, wait)
    finally:
        os.close(descriptor)


def _take(path: Path, descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        reason = error.strerror or error
        raise UsageError(f"{path} cannot be locked: {reason}; choose a folder on a file system with locks") from None
    return True


def check_regular(path: Path) -> None:
    """Refuse a folder, a pipe or a device; a path that does not exist yet passes.

    Raises:
        UsageError: "x.csv is not a regular file; give the path of a file".
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is not a regular file; give the path of a file")


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before its content is computed; an existing file is not changed.

    Raises:
        UsageError: "cannot write x.json: Permission denied; choose another file".
    """
    try:
        check_regular(path)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}; choose another file") from None


def walk(folder: Path) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Yield folders like `os.walk`, sorted by name; follow links to folders, but visit no folder twice."""
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        if (real := os.path.realpath(path)) in seen:
            folders.clear()
        else:
            seen.add(real)
            yield Path(path), folders, sorted(files)


def files_below(folder: Path, name: str) -> list[Path]:
    """Return all files of this name below a folder, at any depth, sorted."""
    return sorted(path / name for path, _, files in walk(folder) if name in files)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, unless they exist.

    Raises:
        UsageError: "cannot make the folder x: Permission denied; choose another --out".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror or error}; choose another --out") from None
