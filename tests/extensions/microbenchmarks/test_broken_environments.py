"""Measurements with broken components installed, and with unknown kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.test_broken_plugins import assert_runs
from tests.cli.test_refused_kernels import assert_refused


@pytest.mark.long
@pytest.mark.parametrize(
    "command",
    [
        ("compressors", "--model", "linear", "--repeats", "1"),
        ("collectives", "--sizes", "1kB", "--iters", "1", "--rounds", "1"),
    ],
    ids=lambda command: command[0],
)
def test_jobs_that_do_not_name_them_run(command: tuple[str, ...], tmp_path: Path) -> None:
    assert_runs(command, tmp_path)


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize("command", ["collectives", "compressors"])
def test_kernels_that_there_are_not_are_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(command, tmp_path, monkeypatch)
