"""Locks of files and folders, which the kernel gives back when their holder ends, however that comes about."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from bench.core.errors import UsageError


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a file or folder while the block runs; the block is told whether it is held.

    Args:
        path: the file or folder, which exists.
        wait: for whoever holds it; otherwise the block runs without it.

    Raises:
        UsageError: its file system knows no locks.
    """
    # Some network file systems lock what is open for writing alone; a folder cannot be.
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
        raise UsageError(f"{path} cannot be locked: {reason}; choose a folder on a file system that can") from None
    return True
