"""Files that a user names: what is no file is refused before it is opened, which might wait or read for ever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from bench.core.errors import UsageError


def check_regular(path: Path) -> None:
    """Refuse a folder, a pipe or a device; what does not exist yet may become a file.

    Raises:
        UsageError: "x.csv is no regular file; give the path of a file".
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file; give the path of a file")


def check_writable(path: Path) -> None:
    """Refuse, before what is to stand in it is made, a file that cannot be written; its content stays as it is.

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
    """As `os.walk`, in the order of names; links to folders are followed, and no folder is seen twice."""
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        if (real := os.path.realpath(path)) in seen:
            folders.clear()
        else:
            seen.add(real)
            yield Path(path), folders, sorted(files)


def files_below(folder: Path, name: str) -> list[Path]:
    """Of this name, however deep, sorted."""
    return sorted(path / name for path, _, files in walk(folder) if name in files)


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, that may be there already.

    Raises:
        UsageError: "cannot make the folder x: Permission denied; choose another --out".
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {folder}: {error.strerror or error}; choose another --out") from None
