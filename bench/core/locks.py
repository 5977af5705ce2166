"""Locks on files and folders; the kernel releases them when the process that holds them ends, even if it is killed."""

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
