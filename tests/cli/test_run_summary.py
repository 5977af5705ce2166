"""The summary after `bench run`: accuracy, or bits per byte of a text with its yardsticks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.cli.run import print_summary
from bench.core.run_folder import RunFolder
from bench.launch.run import Result
from tests.testing.configs import make_config
from tests.testing.fake_rows import fake_row, text_seeds, write_run


def summary(folder: Path, row: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    write_run(folder, row)
    print_summary([make_config()], [Result(folder=RunFolder(folder), status="ok", error="", summary={})])
    return capsys.readouterr().out.splitlines()


def test_a_text_shows_bits_per_byte_and_its_yardsticks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = text_seeds([1000.0], [2.1234], target_bits_per_byte=2.0, time_to_target_s=None)
    lines = summary(tmp_path / "text", row, capsys)
    assert any("bits per byte" in line and "accuracy" not in line for line in lines)
    assert any("2.123" in line and "missed" in line for line in lines)
    assert lines[-2] == "the whole held-out text: gzip 1.97, bz2 1.71, xz 1.58 bits per byte"


def test_other_data_show_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *lines, _ = summary(tmp_path / "images", fake_row(), capsys)
    assert any("accuracy" in line for line in lines)
    assert any("97.00%" in line for line in lines)
    assert not any("bits per byte" in line or "gzip" in line for line in lines)
