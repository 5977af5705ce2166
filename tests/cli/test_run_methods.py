"""`bench run` with several compressors: planned as a sweep, run one after another, compared at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.testing.invoke import invoke

SMALL = (
    "run", "--model", "linear", "--train-size", "64", "--test-size", "32", "--batch-size", "16", "--steps", "2",
    "--threads", "1",
)  # fmt: skip
METHODS = ("--compressor", "none,topk:ratio=0.1,value_dtype=fp32", "--compressor", "powersgd")
NAMES = {"none", "topk:ratio=0.1,value_dtype=fp32", "powersgd"}

pytestmark = pytest.mark.usefixtures("forked_here")


def test_several_methods_end_with_their_comparison(tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = invoke(*SMALL, *METHODS, "--seeds", "1,2", "--out", str(out))
    assert answer.code == 0, answer.error
    assert len(list(out.iterdir())) == 6
    assert "every row against none + native" in answer.out
    assert "seeds=2 each" in answer.out
    assert answer.error.splitlines()[-1] == f"next: bench report {out}"
    single = invoke(*SMALL, "--out", str(out))
    assert single.error.splitlines()[-1] == f"next: bench compare {out}"


def test_as_json_they_are_one_list_that_names_each_method_and_nothing_else_is_printed(tmp_path: Path) -> None:
    answer = invoke(*SMALL, "--compressor", "powersgd,none", "--json", "--out", str(tmp_path))
    runs = json.loads(answer.out)
    assert {(run["compressor"], run["seed"], run["status"]) for run in runs} == {
        ("powersgd", 1, "ok"),
        ("none", 1, "ok"),
    }
    assert "next:" not in answer.error


def test_a_failed_method_is_a_row_and_the_others_go_on(tmp_path: Path) -> None:
    far = ("--lr", "1e12", "--optimizer", "sgd:weight_decay=1", "--steps", "50")
    answer = invoke(*SMALL, *far, "--compressor", "none,sign", "--seeds", "1,2", "--out", str(tmp_path))
    assert answer.code == 3
    assert len(list(tmp_path.iterdir())) == 4
    assert "of 4 runs failed, the last one with: " in answer.error


@pytest.mark.usefixtures("planned_here")
def test_each_method_has_a_plan_and_seeds_are_outermost(tmp_path: Path) -> None:
    answer = invoke(*SMALL, *METHODS, "--seeds", "1,2", "--dry-run", "--json", "--out", str(tmp_path))
    plans = json.loads(answer.out)
    assert [[config["seed"] for config in plan["configs"]] for plan in plans] == [[1, 2]] * len(NAMES)
    assert {config["compressor"] for plan in plans for config in plan["configs"]} == NAMES
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--compressor", "none,topkk"), "compressor = topkk: there is no compressor 'topkk' (did you mean 'topk'?)"),
        (("--compressor", "topk,topk:ratio=0.01"), "names one compressor twice; name each compressor once"),
        (("--compressor", "none", "--compressor", "none"), "--compressor none,none names one compressor twice"),
        (("--compressor", ","), "',' names no component"),
        (
            ("--compressor", "none,topk", "--nnodes", "2", "--rdzv-endpoint", "a:1"),
            "--compressor names 2 compressors, which can only be compared on one machine; with --nnodes 2, give one",
        ),
        (("--compressor", "none,topk", "--resume", "a"), "leave out --compressor"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    arguments: tuple[str, ...], sentence: str, tmp_path: Path
) -> None:
    answer = invoke("run", *arguments, *([] if "--resume" in arguments else ["--out", str(tmp_path / "out")]))
    assert answer.code == 2
    assert sentence in answer.error
    assert not (tmp_path / "out").exists()


def test_a_first_run_is_followed_by_the_runs_to_compare_it_with(tmp_path: Path) -> None:
    answer = invoke(*SMALL, "--compressor", "topk:ratio=0.1,value_dtype=fp32", "--seeds", "1,2", "--out", str(tmp_path))
    command = answer.error.splitlines()[-1].removeprefix("next: bench ").split()
    assert invoke(*command, "--dry-run", "--json").code == 0
    assert "none,topk:ratio=0.1,value_dtype=fp32" in command
    assert command[-4:] == ["--seeds", "1,2", "--out", str(tmp_path)]
