from __future__ import annotations

from pathlib import Path

from bench.report.comparison import compare
from bench.report.store import collect_runs, one_per_seed
from tests.testing.fake_rows import fake_row, stored


def test_a_run_ends_with_its_last_status_and_the_last_known_value_of_each_column(tmp_path: Path) -> None:
    rows = [
        fake_row(
            run_id="a", status="running", step=1, test_accuracy=0.5, time_to_target_s=None, replicas_in_sync=False
        ),
        fake_row(run_id="a", status="running", step=2, test_accuracy=0.9, time_to_target_s=3.0),
        fake_row(run_id="b", seed=2, step=1, replicas_in_sync=None),
        fake_row(run_id="a", status="failed", error="rank 1 died", step=3, test_accuracy=0.8, time_to_target_s=None),
    ]
    a, b = collect_runs(stored(tmp_path, rows))
    assert (a["run_id"], a["status"], a["error"], a["step"]) == ("a", "failed", "rank 1 died", 3)
    assert (a["test_accuracy"], a["time_to_target_s"]) == (0.8, 3.0)
    assert (a.ended_well, b.ended_well) == (False, True)
    assert (a.in_sync, b.in_sync) == (False, None)


def test_the_newest_ok_run_stands_for_a_seed(tmp_path: Path) -> None:
    rows = [
        fake_row(run_id="new", started_at="2026-03-03"),
        fake_row(run_id="old", started_at="2026-03-01"),
        fake_row(run_id="newest-failed", started_at="2026-03-09", status="failed"),
        fake_row(run_id="only", seed=2, status="failed"),
    ]
    runs, repeats = one_per_seed(collect_runs(stored(tmp_path, rows)), ["config_id"])
    assert [run["run_id"] for run in runs] == ["new", "only"]
    (repeat,) = repeats
    assert (repeat.counted["run_id"], repeat.counted["seed"]) == ("new", 1)
    assert {run["run_id"] for run in repeat.superseded} == {"old", "newest-failed"}


def test_runs_in_different_groups_never_stand_for_each_other(tmp_path: Path) -> None:
    rows = [fake_row(run_id="a", git_sha="aaa"), fake_row(run_id="b", git_sha="bbb")]
    runs, repeats = one_per_seed(collect_runs(stored(tmp_path, rows)), ["git_sha"])
    assert [run["run_id"] for run in runs] == ["a", "b"]
    assert repeats == []


def test_a_run_that_went_on_with_other_ranks_is_one_run(tmp_path: Path) -> None:
    rows = [
        fake_row(run_id="a", config_id="two", world_size=2, status="running", step=1),
        fake_row(run_id="a", config_id="four", world_size=4, step=2),
    ]
    (run,) = collect_runs(stored(tmp_path, rows))
    assert (run["config_id"], run["world_size"], run.ended_well, len(run.rows)) == ("four", 4, True, 2)


def test_the_same_settings_of_another_version_are_the_same_run_of_a_group(tmp_path: Path) -> None:
    """A version that knows one option more gives them another `config_id`."""
    rows = [
        fake_row(run_id="old", config_id="1", started_at="2026-03-01"),
        fake_row(run_id="new", config_id="2", started_at="2026-03-02"),
        fake_row(run_id="other", config_id="3", lr=0.1),
    ]
    comparison = compare(stored(tmp_path, rows), by=["compressor"])
    assert [run["run_id"] for run in comparison.baseline.runs] == ["new", "other"]
    assert len(compare(stored(tmp_path, rows)).rows) == 3
