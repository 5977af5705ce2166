"""A rank that hangs while its host is alive: the others name it, and none is ended before it can."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.invoke import execute, only_run, rows, status
from tests.testing.plugins import install


@pytest.mark.parametrize("hosts", ["2", pytest.param("3", marks=pytest.mark.long)])
def test_the_rank_that_hangs_is_named(hosts: str, tmp_path: Path) -> None:
    answer = execute(
        "run", "--hosts", hosts, "--bandwidth", "100mbit", "--compressor", "hanging", "--collective", "ring",
        "--model", "linear", "--train-size", "256", "--test-size", "64", "--batch-size", "16", "--steps", "5",
        "--timeout", "3", "--out", str(tmp_path / "out"), PYTHONPATH=install(tmp_path),
    )  # fmt: skip
    assert answer.code == 3
    assert "waited 3 s for rank 1, which is alive but did not take part" in answer.error
    folder = only_run(tmp_path / "out")
    assert status(folder)["status"] == "failed"
    assert rows(folder)[-1]["status"] == "failed"
