"""Endings of `bench calibrate`: a path that cannot be used, and a signal."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.cli.test_deaths import assert_says_when_stopped
from tests.cli.test_endings import LONG
from tests.testing.invoke import invoke


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("line", "code", "sentence"),
    [
        ("calibrate --out pipe", 2, "pipe is not a regular file"),
        (f"calibrate --out {LONG}", 2, "File name too long"),
        ("calibrate --out nowhere/parts.json", 2, "cannot write nowhere/parts.json: No such file or directory"),
    ],
)
def test_a_path_that_cannot_be_used(
    line: str, code: int, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.chdir(tmp_path)
    answer = invoke(*shlex.split(line))
    assert answer.code == code
    assert sentence in answer.error
    assert "\n" not in answer.error


def test_a_signal_says_that_no_part_was_measured(tmp_path: Path) -> None:
    assert_says_when_stopped("calibrate", "--model", "linear", kept="no part was measured yet", folder=tmp_path)
