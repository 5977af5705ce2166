"""Reading rows, and the runs to which they belong."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.core.errors import NothingToCompare, UsageError
from bench.core.schema import METRICS
from bench.report.comparison import compare
from bench.report.groups import SETTINGS
from bench.report.plots.results import to_frame
from bench.report.store import beside, collect_runs, one_per_seed, read, read_layers
from tests.testing.fake_rows import fake_row, fake_seeds, stored, topk_seeds, write_run, write_runs
from tests.testing.invoke import invoke


def load(paths: Sequence[Path], **options: Any) -> pd.DataFrame:
    return to_frame(read(paths, **options))


def test_a_run_folder_a_folder_of_runs_a_file_and_a_pattern_give_the_same_rows(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a", fake_row())
    expected = load([folder])
    assert len(expected) == 1
    assert expected["seed"].to_list() == [1]
    for path in (tmp_path / "runs", folder / "metrics.csv", tmp_path / "runs" / "*", tmp_path / "r*" / "*" / "m*.csv"):
        assert load([path]).equals(expected)


def test_runs_are_found_at_any_depth_and_in_the_order_of_their_names(tmp_path: Path) -> None:
    write_run(tmp_path / "sweep" / "b" / "2", fake_row(run_id="late"))
    write_run(tmp_path / "sweep" / "a" / "1", fake_row(run_id="early"))
    write_run(tmp_path / "sweep" / ".other" / "3", fake_row(run_id="hidden"))
    assert load([tmp_path])["run_id"].to_list() == ["early", "late"]
    assert load([tmp_path / "sweep" / ".other"])["run_id"].to_list() == ["hidden"]


def test_a_folder_of_plain_csv_files(tmp_path: Path) -> None:
    write_run(tmp_path / "run", fake_row())
    reference = tmp_path / "reference"
    reference.mkdir()
    (tmp_path / "run" / "metrics.csv").rename(reference / "demo.csv")
    (reference / "sizes.csv").write_text("size_bytes,time_s\n1,2\n")
    warnings: list[str] = []
    assert len(load([reference], warn=warnings.append)) == 1
    assert len(warnings) == 1
    assert "sizes.csv is left out: it has no column run_id" in warnings[0]


def test_rows_given_twice_count_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", fake_row(step=1), fake_row(step=2))
    collected = write_run(tmp_path / "all", fake_row(step=1), fake_row(step=2), fake_row(run_id="other", step=1))
    assert len(load([folder, folder / "metrics.csv", collected])) == 3


def test_every_column_of_the_schema_is_there_with_its_type(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    path.write_text("run_id,config_id,seed,compressor,collective,status,since_dropped\nr,c,3,none,native,ok,x\n")
    rows = load([path])
    assert list(rows.columns) == [column.name for column in METRICS]
    assert rows["strategy"].to_list() == ["ddp"]  # there was no other strategy when the file was written
    assert str(rows["seed"].dtype) == "Int64"
    assert str(rows["replicas_in_sync"].dtype) == "boolean"
    assert rows["samples_per_s"].isna().all()


# The header that `bench run` wrote before its options declared their columns.
OLD_HEADER = Path(__file__).with_name("old_metrics_header.csv").read_text(encoding="utf-8").strip().split(",")


def test_an_old_file_is_compared_with_a_new_one(tmp_path: Path) -> None:
    old = fake_seeds([100, 110, 120], hosts=2, target_accuracy=0.9)
    with (tmp_path / "old.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, OLD_HEADER, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(old)
    write_runs(tmp_path / "new", topk_seeds([200, 210, 220], warmup_steps=3, cpu_share=0.5))
    rows = load([tmp_path / "old.csv", tmp_path / "new"])
    assert rows["hosts"].to_list()[:3] == [2, 2, 2]
    assert rows["target_accuracy"].to_list()[:3] == [0.9, 0.9, 0.9]
    assert rows["strategy"].to_list() == ["ddp"] * 6  # in a file without the column there was no other strategy
    assert rows["warmup_steps"].to_list() == [3] * 6  # nor another value than the default
    assert rows["cpu_share"].isna().to_list() == [True] * 3 + [False] * 3
    answer = invoke("compare", str(tmp_path / "old.csv"), str(tmp_path / "new"))
    assert answer.code == 0, answer.error
    assert "topk" in answer.out


def test_a_cut_last_line_is_named_and_the_rest_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "a", fake_row(step=1), fake_row(step=2)) / "metrics.csv"
    path.write_bytes(path.read_bytes()[:-30])
    assert load([path])["step"].to_list() == [1]
    assert f"{path} line 3 is skipped: it is cut" in capsys.readouterr().err


def test_a_row_without_its_seed_is_skipped_with_a_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", fake_row(run_id="r1", seed=None), fake_row(run_id="r2"))
    warnings: list[str] = []
    assert load([folder], warn=warnings.append)["run_id"].to_list() == ["r2"]
    assert "metrics.csv line 2 is skipped: seed is empty" in warnings[0]


@pytest.mark.parametrize("content", ["a,b\n1,2\n", "\x00\x01\x02" * 50, '"' + "x" * 200_000])
def test_a_foreign_file_is_refused_by_the_columns_it_lacks(tmp_path: Path, content: str) -> None:
    (tmp_path / "foreign.csv").write_text(content)
    with pytest.raises(UsageError, match=r"foreign\.csv is not a metrics file .* no column run_id, config_id, seed"):
        load([tmp_path / "foreign.csv"])


def test_only_the_missing_columns_are_named(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("run_id,config_id,compressor,collective,status\nr,c,none,native,ok\n")
    with pytest.raises(UsageError, match="it has no column seed;"):
        load([tmp_path / "m.csv"])


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    write_run(tmp_path / "a", fake_row())
    with pytest.raises(NothingToCompare, match="absent does not exist"):
        load([tmp_path / "a", tmp_path / "absent"])
    with pytest.raises(NothingToCompare, match="does not exist"):
        load([tmp_path / "nothing-*"])


def test_with_keep_going_every_bad_file_and_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    cut = write_run(tmp_path / "cut", fake_row(run_id="r1"), fake_row(run_id="r2")) / "metrics.csv"
    cut.write_bytes(cut.read_bytes()[:-30])
    (tmp_path / "foreign.csv").write_text("a,b\n1,2\n")
    warnings: list[str] = []
    given = [tmp_path / "absent", tmp_path / "foreign.csv", cut]
    rows = read(given, keep_going=True, warn=warnings.append)
    assert [row["run_id"] for row in rows] == ["r1"]
    absent, foreign, torn = warnings
    assert "absent does not exist" in absent
    assert "foreign.csv is not a metrics file" in foreign
    assert f"{cut} line 3 is skipped: it is cut" in torn


def test_nothing_readable_is_nothing_to_compare(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.csv").touch()
    (tmp_path / "header.csv").write_text("run_id,config_id,seed,compressor,collective,status\n")
    warnings: list[str] = []
    for name in ("empty", "empty.csv", "header.csv"):
        with pytest.raises(NothingToCompare, match=r"no readable row in .*empty|no readable row in .*header"):
            load([tmp_path / name], warn=warnings.append)
    assert any("holds no metrics.csv" in sentence for sentence in warnings)
    assert any("empty.csv is left out: it is empty" in sentence for sentence in warnings)


def test_an_empty_run_beside_a_good_one_is_only_a_warning(tmp_path: Path) -> None:
    write_runs(tmp_path, fake_seeds([1.0, 2.0]))
    (tmp_path / "started-and-died").mkdir()
    warnings: list[str] = []
    assert len(load([tmp_path / "*"], warn=warnings.append)) == 2
    assert len(warnings) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "a", fake_row()) / "metrics.csv"

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(NothingToCompare, match=r"metrics\.csv cannot be read: Permission denied"):
        load([path])


def test_an_empty_cell_means_what_an_absent_column_means(tmp_path: Path) -> None:
    """This occurs in files concatenated from old and new ones."""
    path = tmp_path / "old.csv"
    path.write_text("run_id,config_id,seed,compressor,collective,status\nr,c,3,none,native,ok\n")
    write_run(tmp_path / "new", fake_row(accumulate=4))
    both = tmp_path / "both.csv"
    frames = [pd.read_csv(file) for file in (path, tmp_path / "new" / "metrics.csv")]
    pd.concat(frames).to_csv(both, index=False)
    together = read([both])
    alone = read([path])[0]
    assert {name: together[0][name] for name in SETTINGS} == {name: alone[name] for name in SETTINGS}
    assert [row["accumulate"] for row in together] == [1, 4]


def test_runs_behind_links_are_found_once_and_links_that_lead_back_end(tmp_path: Path) -> None:
    write_run(tmp_path / "elsewhere" / "a", fake_row(run_id="a"))
    write_run(tmp_path / "runs" / "b", fake_row(run_id="b"))
    (tmp_path / "runs" / "a").symlink_to(tmp_path / "elsewhere" / "a")
    (tmp_path / "runs" / "up").symlink_to(tmp_path)
    assert [row["run_id"] for row in read([tmp_path / "runs"])] == ["a", "b"]
    assert len(beside([tmp_path / "runs"], "metrics.csv")) == 2


def test_layers_of_another_program_are_left_out_with_a_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", fake_row())
    (folder / "layers.csv").write_text("name,shape\nconv,3\n")
    warnings: list[str] = []
    assert read_layers([folder], warn=warnings.append) == []
    assert "layers.csv is left out: it has no column run_id" in warnings[0]


def test_rows_that_another_program_sorted_are_put_in_order_again(tmp_path: Path) -> None:
    """If rows are sorted by accuracy, for example, the last line of the file is not the end of the run."""
    rows = [
        fake_row(step=40, status="ok", test_accuracy=0.81),
        fake_row(step=20, status="running", test_accuracy=0.97),
        fake_row(step=10, status="running", test_accuracy=0.99),
    ]
    (run,) = collect_runs(read([write_run(tmp_path / "a", *rows)]))
    assert [row["step"] for row in run.rows] == [10, 20, 40]
    assert (run["status"], run["test_accuracy"]) == ("ok", 0.81)


def test_the_row_of_an_end_follows_its_evaluations_and_a_resumed_run_what_went_before(tmp_path: Path) -> None:
    rows = [
        fake_row(step=30, status="ok", resumes=1),
        fake_row(step=None, status="failed", resumes=0),
        fake_row(step=20, status="running", resumes=1),
        fake_row(step=40, status="running", resumes=0),
    ]
    (run,) = collect_runs(read([write_run(tmp_path / "a", *rows)]))
    assert [(row["resumes"], row["step"]) for row in run.rows] == [(0, 40), (0, None), (1, 20), (1, 30)]


def test_a_column_that_is_there_twice_is_refused_wherever_the_file_was_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(
        "run_id,config_id,seed,compressor,collective,status,test_accuracy,test_accuracy\nr,c,3,none,native,ok,.8,.5\n"
    )
    for given in (path, tmp_path):
        with pytest.raises(
            UsageError, match=r"metrics\.csv: it has more than one column test_accuracy; remove all but one"
        ):
            read([given])
    write_run(tmp_path / "good", fake_row())
    warnings: list[str] = []
    assert len(read([tmp_path], keep_going=True, warn=warnings.append)) == 1
    assert "test_accuracy" in warnings[0]


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
    runs, repeated = one_per_seed(collect_runs(stored(tmp_path, rows)), ["config_id"])
    assert [run["run_id"] for run in runs] == ["new", "only"]
    assert [(run["run_id"], run["seed"]) for run in repeated] == [("new", 1)]


def test_runs_in_different_groups_never_stand_for_each_other(tmp_path: Path) -> None:
    rows = [fake_row(run_id="a", git_sha="aaa"), fake_row(run_id="b", git_sha="bbb")]
    runs, repeated = one_per_seed(collect_runs(stored(tmp_path, rows)), ["git_sha"])
    assert [run["run_id"] for run in runs] == ["a", "b"]
    assert repeated == []


def test_a_run_that_went_on_with_other_ranks_is_one_run(tmp_path: Path) -> None:
    rows = [
        fake_row(run_id="a", config_id="two", world_size=2, status="running", step=1),
        fake_row(run_id="a", config_id="four", world_size=4, step=2),
    ]
    (run,) = collect_runs(stored(tmp_path, rows))
    assert (run["config_id"], run["world_size"], run.ended_well, len(run.rows)) == ("four", 4, True, 2)


def test_the_same_settings_of_another_version_are_the_same_run_of_a_group(tmp_path: Path) -> None:
    """A version with one more option computes another `config_id` for them."""
    rows = [
        fake_row(run_id="old", config_id="1", started_at="2026-03-01"),
        fake_row(run_id="new", config_id="2", started_at="2026-03-02"),
        fake_row(run_id="other", config_id="3", lr=0.1),
    ]
    comparison = compare(stored(tmp_path, rows), by=["compressor"])
    assert [run["run_id"] for run in comparison.baseline.runs] == ["new", "other"]
    assert len(compare(stored(tmp_path, rows)).rows) == 3
