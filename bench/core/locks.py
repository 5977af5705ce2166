"""Locks of files and folders, which the kernel gives back when their holder ends, however that comes about."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of a file or folder while the block runs; the block is told whether it is held.

    Args:
        path: the file or folder, which exists.
        wait: for whoever holds it; otherwise the block runs without it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield _take(descriptor, wait)
    finally:
        os.close(descriptor)


def _take(descriptor: int, wait: bool) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True
