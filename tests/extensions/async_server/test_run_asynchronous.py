"""A real job with asynchronous ranks, next to a synchronous one; one rank is deliberately slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.testing.invoke import invoke, only_run, rows

EPOCHS, BATCH, WORLD_SIZE, TRAIN_SIZE = 2, 16, 2, 320
STEPS_PER_EPOCH = TRAIN_SIZE // WORLD_SIZE // BATCH

pytestmark = pytest.mark.usefixtures("forked_here")


def train(out: Path, strategy: str) -> list[dict[str, str]]:
    """Run a job, and return its rows."""
    answer = invoke(
        "run", "--model", "linear", "--train-size", str(TRAIN_SIZE), "--test-size", "64", "--batch-size", str(BATCH),
        "--epochs", str(EPOCHS), "--collective", "server", "--strategy", strategy, "--straggler", "rank=1,slowdown=40",
        "--threads", "1", "--out", str(out),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    return rows(only_run(out))


def test_nobody_waits_for_a_slow_rank(tmp_path: Path) -> None:
    waiting, free = train(tmp_path / "ddp", "ddp"), train(tmp_path / "asp", "async_server:mode=asp")
    for run in (waiting, free):
        assert [int(row["step"]) for row in run] == [STEPS_PER_EPOCH, 2 * STEPS_PER_EPOCH]
        assert [float(row["epoch"]) for row in run] == [1.0, 2.0]
        assert {row["replicas_in_sync"] for row in run} == {"true"}
        assert {row["straggler"] for row in run} == {"rank=1,slowdown=40"}
        assert {row["collective"] for row in run} == {"server"}
        assert run[-1]["status"] == "ok"
    assert [{row["strategy"] for row in run} for run in (waiting, free)] == [{"ddp"}, {"async_server:mode=asp"}]
    assert [int(row["samples"]) for row in waiting] == [TRAIN_SIZE, 2 * TRAIN_SIZE]
    for epoch, row in enumerate(free, 1):
        assert 0 <= int(row["samples"]) - epoch * TRAIN_SIZE < WORLD_SIZE * BATCH
    assert {row["staleness_mean"] for row in waiting} == {""}
    assert all(0 < float(row["staleness_mean"]) < float(row["staleness_max"]) for row in free)
    # while the slow rank computes once, the other makes several steps; synchronous ranks are at most one version behind
    assert max(float(row["staleness_max"]) for row in free) >= 3
