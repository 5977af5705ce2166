"""Real jobs with local steps whose ranks are killed and return."""

from __future__ import annotations

import random
import time
from pathlib import Path

import psutil
import pytest

from bench.core.run_folder import RunFolder
from bench.hosts.support import hosts_supported
from tests.testing.invoke import execute, invoke, only_run, processes_of, rows, start
from tests.testing.plugins import install

RUN = ("run", "--dataset", "digits", "--threads", "1", "--batch-size", "16")
QUICK = (*RUN, "--model", "linear", "--train-size", "128", "--test-size", "64", "--steps", "48", "--eval-every", "16")

pytestmark = pytest.mark.usefixtures("forked_here")


def test_ranks_that_stay_make_the_rows_of_local_without_a_quorum(tmp_path: Path) -> None:
    found = []
    for strategy in ("local:steps=4", "elastic:steps=4,quorum=3"):
        out = tmp_path / strategy
        answer = invoke(*QUICK, "--strategy", strategy, "--compressor", "topk:ratio=0.1", "--collective", "ring",
                        "--world-size", "3", "--out", str(out))  # fmt: skip
        assert answer.code == 0, answer.error
        found.append(rows(only_run(out)))
    plain, with_quorum = found
    for name in ("step", "samples", "train_loss", "test_accuracy", "payload_bytes_per_step", "messages_per_step"):
        assert [row[name] for row in plain] == [row[name] for row in with_quorum], name
    for row, other in zip(plain, with_quorum, strict=True):  # rank 0 evaluates alone, in other batches
        assert float(row["test_loss"]) == pytest.approx(float(other["test_loss"]), rel=1e-6)
    assert [(row["ranks_lost"], row["ranks_returned"]) for row in (plain[-1], with_quorum[-1])] == [
        ("", ""),
        ("0", "0"),
    ]
    assert {row["replicas_in_sync"] for row in with_quorum} == {"true"}


def test_a_rank_killed_in_a_sum_returns_and_the_others_wait_for_the_quorum(tmp_path: Path) -> None:
    told = {"PYTHONPATH": install(tmp_path), "MORTAL": str(tmp_path / "was-killed")}
    answer = execute(*QUICK, "--strategy", "elastic:steps=4,quorum=2", "--compressor", "mortal:ratio=0.1",
                     "--world-size", "2", "--out", str(tmp_path / "runs"), **told)  # fmt: skip
    assert answer.code == 0, answer.error
    folder = only_run(tmp_path / "runs")
    assert "rank 1 starts again in 1 s: it ended with exit code -9" in RunFolder(folder).log.read_text(encoding="utf-8")
    last = rows(folder)[-1]
    assert (last["ranks_lost"], last["ranks_returned"], last["replicas_in_sync"]) == ("1", "1", "true")
    # Rank 1 was killed after step 32 and has started again from step 28.
    assert int(last["samples"]) == (48 + 32 + 20) * 16


def test_ranks_leave_without_an_error_once_rank_0_has_reached_the_target(tmp_path: Path) -> None:
    answer = invoke(*QUICK, "--strategy", "elastic:steps=4,quorum=1", "--world-size", "3", "--target-accuracy", "0.01",
                    "--stop-at-target", "--out", str(tmp_path))  # fmt: skip
    assert answer.code == 0, answer.error
    folder = RunFolder(only_run(tmp_path))
    assert [row["step"] for row in rows(folder.path)] == ["16"]
    assert folder.log.read_text(encoding="utf-8") == ""
    assert not list(folder.errors.glob("*"))


def kill_ranks(folder: RunFolder, kills: int, seed: int) -> None:
    """Kill ranks other than 0, one after the other, each after it has joined the others."""
    draw = random.Random(seed)
    for _ in range(kills):
        rank = draw.choice((1, 2, 3))
        while not folder.joined(rank).exists():
            time.sleep(0.05)
        time.sleep(draw.uniform(0, 1.5))
        process_of(folder, rank).kill()
        while folder.joined(rank).exists():
            time.sleep(0.05)


def process_of(folder: RunFolder, rank: int) -> psutil.Process:
    found = processes_of(folder.logs).items()
    (process,) = (each for each, files in found if any(f"/rank-{rank}_" in file for file in files))
    return process


@pytest.mark.long
@pytest.mark.parametrize("where", ["one machine", "virtual hosts"])
def test_after_ten_kills_the_accuracy_is_that_of_the_undisturbed_run(where: str, tmp_path: Path) -> None:
    if where == "virtual hosts" and not hosts_supported()[0]:
        pytest.skip(hosts_supported()[1])
    ranks = ("--world-size", "4") if where == "one machine" else ("--hosts", "4", "--bandwidth", "100mbit")
    # The compressor sleeps while it encodes, so that the run is long, and kills also hit sums.
    run = (*RUN, *ranks, "--model", "small_cnn", "--steps", "1000", "--eval-every", "50", "--strategy",
           "elastic:steps=10,quorum=2", "--compressor", "sleepy", "--collective", "ring")  # fmt: skip
    told = {"PYTHONPATH": install(tmp_path)}
    undisturbed = execute(*run, "--out", str(tmp_path / "undisturbed"), **told)
    assert undisturbed.code == 0, undisturbed.error
    (tmp_path / "killed").mkdir()
    process = start(*run, "--out", str(tmp_path / "killed"), **told)
    while not list((tmp_path / "killed").glob("*")):
        time.sleep(0.05)
    folder = only_run(tmp_path / "killed")
    kill_ranks(RunFolder(folder), kills=10, seed=7)
    _, error = process.communicate()
    assert process.returncode == 0, error
    wanted, found = rows(only_run(tmp_path / "undisturbed"))[-1], rows(folder)
    assert abs(float(found[-1]["test_accuracy"]) - float(wanted["test_accuracy"])) <= 0.01
    assert {row["replicas_in_sync"] for row in found} == {"true"}
    assert found[-1]["ranks_lost"] == "10"
    assert int(found[-1]["ranks_returned"]) >= 9
    assert [row["step"] for row in found] == [str(step) for step in range(50, 1001, 50)]
