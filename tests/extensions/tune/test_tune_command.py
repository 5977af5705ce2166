"""`bench tune` with real runs: its output is a sweep file, and finished runs are not repeated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.datasets.folders import find_files
from tests.cli.test_startup import assert_refused_where_torch_is_broken
from tests.testing.invoke import execute, invoke, rows

TUNE = (
    "tune", "--model", "linear", "--train-size", "256", "--test-size", "64", "--batch-size", "16", "--epochs", "1",
    "--holdout-size", "64", "--compressors", "none,topk:ratio=0.1", "--rates", "0.1,0.01,0.0001", "--seeds", "1-2",
)  # fmt: skip


def test_tuned_then_swept(tmp_path: Path) -> None:
    tuned, swept = tmp_path / "tune", tmp_path / "sweep"
    first = execute(*TUNE, "--out", str(tuned))
    assert first.code == 0, first.error
    lines = [line for line in first.out.splitlines() if line.startswith("bench run ")]
    assert len(lines) == 2
    assert all("--rates-tried 3 --seeds 1,2" in line and "holdout" not in line for line in lines)
    runs = [rows(path.parent)[-1] for path in tuned.glob("*/metrics.csv")]
    assert {(row["seed"], row["holdout_size"], row["rates_tried"]) for row in runs} == {("100", "64", "0")}
    assert len(runs) == 6
    assert not find_files(tuned)[0]  # a text holds none of the results

    again = execute(*TUNE, "--out", str(tuned), "--json")
    assert "6 done; 0 to do now" in again.error
    chosen = {each["settings"]["compressor"]: each for each in json.loads(again.out)}
    for compressor, each in chosen.items():
        accuracies = {float(row["lr"]): float(row["test_accuracy"]) for row in runs if row["compressor"] == compressor}
        assert accuracies[each["best"]["lr"]] == max(accuracies.values())

    assert execute("sweep", str(tuned / "tuned.toml"), "--out", str(swept)).code == 0
    finals = [rows(path.parent)[-1] for path in swept.glob("*/metrics.csv")]
    assert {(row["holdout_size"], row["rates_tried"]) for row in finals} == {("0", "3")}
    assert {(row["compressor"], float(row["lr"]), row["seed"]) for row in finals} == {
        (compressor, each["best"]["lr"], seed) for compressor, each in chosen.items() for seed in ("1", "2")
    }


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ((), "--compressors none,topk,powersgd --rates 0.005,0.01,0.02,0.04,0.08 --holdout-size 269"),
        (
            ("--compressors", "topk", "--optimizer", "adam", "--train-size", "100"),
            "--rates 0.00025,0.0005,0.001,0.002,0.004 --holdout-size 20",
        ),
        (("--lr", "0.4", "--compressor", "sign"), "--rates 0.1,0.2,0.4,0.8,1.6 --holdout-size 269"),
        (("--rates", "0.1", "--holdout-size", "9"), "--compressors none,topk,powersgd"),
        (
            ("--strategy", "local:preset=diloco", "--compressor", "topk", "--rates", "0.1"),
            "--holdout-size 269 --outer-rates 0.4,0.7,1",
        ),
        (
            ("--strategy", "local:outer_lr=0.8", "--compressor", "topk", "--rates", "0.1"),
            "--holdout-size 269",
        ),
    ],
)
@pytest.mark.usefixtures("planned_here")
def test_what_is_left_open_has_defaults(
    arguments: tuple[str, ...], chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = invoke("tune", *arguments, "--dry-run")
    assert answer.code == 0, answer.error
    assert answer.error.splitlines()[0] == f"chosen by default: {chosen}"


@pytest.mark.usefixtures("planned_here")
def test_outer_rates_are_tried_with_the_other_options_of_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    local = ("--strategy", "local:steps=8,preset=diloco", "--outer-rates", "0.9,0.5")
    answer = invoke("tune", *local, "--rates", "0.1,0.2", "--compressors", "topk", "--dry-run", "--json")
    assert answer.code == 0, answer.error
    strategies = [f"local:outer_lr={outer},preset=diloco,steps=8" for outer in (0.5, 0.9)]
    assert sorted((each["settings"]["lr"], each["settings"]["strategy"]) for each in json.loads(answer.out)) == [
        (lr, strategy) for lr in (0.1, 0.2) for strategy in strategies
    ]


@pytest.mark.usefixtures("planned_here")
def test_a_file_names_outer_rates_as_outer_lr(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text(
        "[base]\nholdout-size = 9\n[[method]]\nstrategy = 'local:steps=5'\n[tune]\nouter_lr = [0.4, 1]\n",
        encoding="utf-8",
    )
    answer = invoke("tune", str(file), "--out", str(tmp_path / "out"), "--dry-run", "--json")
    assert answer.code == 0, answer.error
    strategies = sorted(each["settings"]["strategy"] for each in json.loads(answer.out))
    assert strategies == ["local:outer_lr=0.4,steps=5", "local:outer_lr=1,steps=5"]


@pytest.mark.parametrize(
    ("arguments", "chosen", "left_out"),
    [
        (("--strategy", "local:preset=sparseloco,outer_lr=1"), "topk,powersgd", ["none"]),
        (("--optimizer", "demo"), "none", ["topk", "powersgd"]),
    ],
)
@pytest.mark.usefixtures("planned_here")
def test_default_compressors_work_with_the_other_options(
    arguments: tuple[str, ...], chosen: str, left_out: list[str], tmp_path: Path
) -> None:
    answer = invoke("tune", *arguments, "--rates", "0.1", "--holdout-size", "9", "--out", str(tmp_path), "--dry-run")
    assert answer.code == 0, answer.error
    *notes, said, _ = answer.error.splitlines()
    assert [note.partition(" is not tried by default: ")[0] for note in notes] == [f"note: {name}" for name in left_out]
    assert said == f"chosen by default: --compressors {chosen}"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--optimizer", "demo", "--collective", "ring"), "choose others with --compressors, or change these options"),
        (
            ("--optimizer", "demo", "--compressors", "none,topk"),
            "compressor = topk, lr = 0.1: demo encodes what it sends",
        ),
        (("--batch-size", "5000"), "--batch-size 5000 is larger than a rank's shard"),
    ],
)
@pytest.mark.usefixtures("planned_here")
def test_compressors_that_do_not_work_are_refused(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    answer = invoke("tune", *arguments, "--rates", "0.1", "--holdout-size", "9", "--out", str(tmp_path), "--dry-run")
    assert answer.code == 2
    assert sentence in answer.error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--outer-rates", "1,b", "--strategy", "local"), "--outer-rates 1,b is not a list of numbers; write 0.01"),
        (("--outer-rates", "1"), "--outer-rates needs --strategy local without outer_lr; give that strategy"),
        (("--outer-rates", "1", "--strategy", "local:outer_lr=1"), "give that strategy, or leave out --outer-rates"),
        (("x.toml", "--outer-rates", "1"), "with rates to try as lr and outer_lr under [tune], or leave out the file"),
        (("--rates", "a"), "--rates a is not a list of numbers; write 0.01,0.02,0.05"),
        (("--compressor", "topk", "--compressors", "none"), "--compressor and --compressors contradict each other"),
        (("x.toml", "--lr", "0.1"), "x.toml must contain all options; write the other options there"),
    ],
)
def test_refusals(arguments: tuple[str, ...], sentence: str) -> None:
    answer = invoke("tune", *arguments)
    assert answer.code == 2
    assert sentence in answer.error


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = invoke("tune", "--rates", "0.1", "--holdout-size", "9", "--write", "nowhere/x.toml")
    assert answer.code == 2
    assert "cannot write nowhere/x.toml: No such file or directory" in answer.error
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_component_is_refused_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_refused_where_torch_is_broken({"tune --compressors topk:ratoi=1": "topk has no option 'ratoi'"}, tmp_path)
