"""A run that lost a rank and goes on: its rows are those of the run that lost none."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.core.schema import LAYERS, METRICS, Column
from tests.testing.invoke import execute, invoke, only_run, rows, status
from tests.testing.plugins import install

pytestmark = pytest.mark.timeout(300)

# Three ranks and several buckets, whose sums are rounded as the layers lie in them.
RUN = (
    "run", "--model", "small_cnn", "--train-size", "192", "--test-size", "32", "--batch-size", "8", "--steps", "10",
    "--eval-every", "4", "--checkpoint-every", "3", "--world-size", "3", "--bucket-mb", "0.05", "--compressor",
    "mortal:ratio=0.05", "--collective", "ring",
)  # fmt: skip


def repeating(folder: Path, name: str, columns: tuple[Column, ...]) -> list[dict[str, str]]:
    names = [column.name for column in columns if column.deterministic and column.group != "origin"]
    return [{name: row[name] for name in names} for row in rows(folder, name)]


def test_a_run_that_lost_a_rank_goes_on_from_its_checkpoint_as_if_it_had_not(tmp_path: Path) -> None:
    told = {"PYTHONPATH": install(tmp_path), "MORTAL": str(tmp_path / "was-killed")}
    killed = execute(*RUN, "--out", str(tmp_path / "killed"), **told)
    folder = only_run(tmp_path / "killed")
    assert killed.code == 3
    assert "rank 1 was killed by SIGKILL" in killed.error
    # That of step 3 was there before that of step 6 was begun.
    assert re.search(rf"to go on from step [36]: bench run --resume {folder}", killed.error)
    resumed = execute("run", "--resume", str(folder), **told)
    assert resumed.code == 0, resumed.error
    undisturbed = execute(*RUN, "--out", str(tmp_path / "undisturbed"), **told)
    assert undisturbed.code == 0, undisturbed.error
    other = only_run(tmp_path / "undisturbed")
    assert [row["step"] for row in rows(folder)] == ["4", "8", "10"]
    for name, columns in (("metrics.csv", METRICS), ("layers.csv", LAYERS)):
        assert repeating(folder, name, columns) == repeating(other, name, columns)
    assert [row["resumes"] for row in rows(folder)][1:] == ["1", "1"]
    assert status(folder)["status"] == "ok"
    assert "came to its end" in invoke("run", "--resume", str(folder)).error


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--epochs", "3"), "leave out --epochs"),
        (("--timeout", "300", "--seeds", "1,2"), "leave out --timeout, --seeds"),
        ((), "is no run folder (it holds no config.json); give one below results/runs"),
    ],
)
def test_a_resumed_run_takes_nothing_else(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    answer = invoke("run", "--resume", str(tmp_path), *arguments)
    assert answer.code == 2
    assert sentence in answer.error
