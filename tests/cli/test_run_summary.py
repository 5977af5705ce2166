"""The summary after `bench run`: accuracy, or bits per byte of a text with its yardsticks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.api.execution import warn_of_runs
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"replicas_in_sync": False}, "the ranks ended with different parameters (seeds: 1), so this was not data-pa"),
        ({"link_warnings": "host1 reached half of it"}, "the links were not as configured: host1 reached half of it"),
        ({"factor_fallbacks": 2}, "K-FAC sent some factors in another form"),
        ({"other_cpu_share": 0.5}, "other programs used up to 50% of this machine's cores during training"),
    ],
)
def test_what_weakens_a_run_is_said_without_a_comparison(
    change: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for row, are_said in ((fake_row(), False), (fake_row(**change), True)):
        folder = tmp_path / str(are_said)
        lines = summary(folder, row, capsys)
        assert any("in sync" in line for line in lines) == (row["replicas_in_sync"] is False)
        warn_of_runs([Result(folder=RunFolder(folder), status="ok", error="", summary={})])
        printed = capsys.readouterr().err
        assert ("warning: " in printed and said in printed) == are_said
