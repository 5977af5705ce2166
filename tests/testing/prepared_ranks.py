"""Ranks that record which process prepared their data."""

from __future__ import annotations

import json
import os
from pathlib import Path

prepared_by: list[int] = []


def prepare(path: str) -> None:
    """Record this process's id for the ranks; fail if there is a file `damaged`."""
    if (Path(path) / "damaged").exists():
        raise ValueError("the data are damaged")
    prepared_by.append(os.getpid())


def main(path: str) -> int:
    """Write [id of the parent, ids of the processes that prepared]."""
    told = Path(path) / f"rank-{os.environ['RANK']}.json"
    told.write_text(json.dumps([os.getppid(), *prepared_by]), encoding="utf-8")
    return 0
