"""Files that a user names: what is no file is refused before it is opened, which might wait or read for ever."""

from __future__ import annotations

from pathlib import Path

from bench.core.errors import UsageError


def check_regular(path: Path) -> None:
    """Refuse a folder, a pipe or a device; what does not exist yet may become a file.

    Raises:
        UsageError: "x.csv is no regular file; give the path of a file".
    """
    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no regular file; give the path of a file")
