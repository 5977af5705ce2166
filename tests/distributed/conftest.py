"""Shared memory that only one test uses."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Yield an empty folder in memory that the test must leave empty; other programs use /dev/shm meanwhile."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
        assert not list(Path(folder).iterdir())
