"""The rows of tunings: they match the current file, and failed settings are never chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.core.rows import RowWriter, read_rows
from benchmarks.published.sweeps import RUNS
from benchmarks.published.tuning import best_for, keep_tuning
from tests.testing.fake_rows import fake_row, write_runs


def test_a_setting_that_failed_is_not_chosen_for_what_it_reached_before(tmp_path: Path) -> None:
    for name in ("hylo", "hylo_twobit"):
        RowWriter(tmp_path / f"tuning-{name}.csv").extend(
            [
                fake_row(run_id="slow", lr=0.1, test_accuracy=0.8),
                fake_row(run_id="fast", lr=0.4, test_accuracy=0.9, status="failed"),
            ]
        )
    (setting,) = best_for("hylo", tmp_path).values()
    assert setting.lr == 0.1


def test_rows_of_a_tuning_are_those_that_its_file_asks_for_and_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    digests = {"asked": "ok", "before": "ok", "torn": "running", "lost": "failed"}
    runs = [fake_row(run_id=digest, digest=digest, status=status) for digest, status in digests.items()]
    write_runs(RUNS / "tuning-hylo", runs)
    keep_tuning("hylo", {"asked", "torn", "lost"}, tmp_path)
    assert [row["run_id"] for row in read_rows(tmp_path / "tuning-hylo.csv")] == ["asked", "lost"]
