"""Real jobs with local steps: next to DDP, with another number of ranks, and resumed between two exchanges."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.core.schema import LAYERS, METRICS
from bench.models.cnn import SmallCnn
from tests.cli.test_run_resumed import repeating
from tests.testing.invoke import execute, invoke, only_run, rows
from tests.testing.plugins import install

RUN = ("run", "--threads", "1", "--train-size", "128", "--test-size", "64", "--batch-size", "16")

pytestmark = pytest.mark.usefixtures("forked_here")


def train(out: Path, *arguments: str) -> list[dict[str, str]]:
    answer = invoke(*RUN, *arguments, "--out", str(out))
    assert answer.code == 0, answer.error
    return rows(only_run(out))


def test_one_local_step_of_plain_sgd_is_ddp_and_one_rank_is_plain_training(tmp_path: Path) -> None:
    plain = ("--model", "linear", "--optimizer", "sgd:momentum=0", "--lr", "0.05", "--steps", "12", "--eval-every", "1")
    of_ranks = [
        [train(tmp_path / f"{ranks}-{strategy}", *plain, "--world-size", str(ranks), "--strategy", strategy)
         for strategy in ("ddp", "local:steps=1")]
        for ranks in (2, 1)
    ]  # fmt: skip
    for ddp, local in of_ranks:
        assert len(ddp) == len(local) == 12
        for wanted, found in zip(ddp, local, strict=True):
            assert float(found["test_loss"]) == pytest.approx(float(wanted["test_loss"]), rel=1e-5)
            assert float(found["train_loss"]) == pytest.approx(float(wanted["train_loss"]), rel=1e-5)
            assert found["replicas_in_sync"] == "true"
    numel = 3072 * 10 + 10
    assert [float(row["payload_bytes_per_step"]) for row in of_ranks[0][1]] == [4.0 * numel] * 12


def test_a_step_sends_the_bytes_of_an_exchange_divided_by_its_steps(tmp_path: Path) -> None:
    found = train(
        tmp_path, "--model", "small_cnn", "--steps", "16", "--eval-every", "4", "--strategy",
        "local:steps=4,fragments=2,delay=1,alpha=0.5", "--compressor", "bf16", "--collective", "ring", "--clip-norm",
        "1", "--accumulate", "2", "--world-size", "2",
    )  # fmt: skip
    assert {row["replicas_in_sync"] for row in found} == {"true"}
    numel = sum(parameter.numel() for parameter in SmallCnn().build(10).parameters())
    assert [float(row["payload_bytes_per_step"]) for row in found] == [2 * numel / 4] * 4
    assert float(found[-1]["train_loss"]) < float(found[0]["train_loss"])


@pytest.mark.long
def test_a_run_that_lost_a_rank_between_exchanges_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    run = (
        *RUN, "--model", "small_cnn", "--steps", "33", "--eval-every", "15", "--checkpoint-every", "9", "--strategy",
        "local:steps=4,fragments=2,delay=1,alpha=0.5,outer_momentum=0.9,outer_lr=0.5", "--compressor",
        "mortal:ratio=0.05", "--collective", "ring",
    )  # fmt: skip
    told = {"PYTHONPATH": install(tmp_path), "MORTAL": str(tmp_path / "was-killed")}
    killed = execute(*run, "--out", str(tmp_path / "killed"), **told)  # in step 29, during an exchange
    assert killed.code == 3, killed.error
    folder = only_run(tmp_path / "killed")
    assert re.search(r"to resume from step (18|27)", killed.error)  # at step 27 an exchange is under way
    resumed = execute("run", "--resume", str(folder), **told)
    assert resumed.code == 0, resumed.error
    undisturbed = execute(*run, "--out", str(tmp_path / "undisturbed"), **told)
    assert undisturbed.code == 0, undisturbed.error
    other = only_run(tmp_path / "undisturbed")
    for name, columns in (("metrics.csv", METRICS), ("layers.csv", LAYERS)):
        assert repeating(folder, name, columns) == repeating(other, name, columns)


@pytest.mark.long
def test_another_number_of_ranks_goes_on_with_the_mean_of_what_waited(tmp_path: Path) -> None:
    run = (
        *RUN, "--model", "small_cnn", "--steps", "33", "--checkpoint-every", "9", "--strategy", "local:steps=2",
        "--compressor", "mortal:ratio=0.05", "--collective", "ring",
    )  # fmt: skip
    told = {"PYTHONPATH": install(tmp_path), "MORTAL": str(tmp_path / "was-killed")}
    assert execute(*run, "--out", str(tmp_path / "runs"), **told).code == 3
    folder = only_run(tmp_path / "runs")
    resumed = execute("run", "--resume", str(folder), "--world-size", "3", "--resume-residuals", "sum", **told)
    assert resumed.code == 0, resumed.error
    (row,) = rows(folder)
    assert (row["world_size"], row["replicas_in_sync"], row["step"]) == ("3", "true", "33")


BY_SPEED = (
    *RUN, "--model", "small_cnn", "--steps", "32", "--eval-every", "16", "--checkpoint-every", "4", "--world-size", "2",
    "--strategy", "local:steps=auto,seconds=0.02", "--compressor", "mortal:ratio=0.05", "--collective", "ring",
    "--accumulate", "2", "--schedule", "cosine",
)  # fmt: skip


@pytest.mark.long
def test_ranks_with_different_numbers_of_steps_use_the_samples_that_the_rows_say(tmp_path: Path) -> None:
    told = {"PYTHONPATH": install(tmp_path), "MORTAL": str(tmp_path / "was-killed")}
    killed = execute(*BY_SPEED, "--straggler", "rank=1,slowdown=4", "--out", str(tmp_path / "runs"), **told)
    assert killed.code == 3, killed.error  # in the eighth exchange
    assert "steps=auto follows measured times, so another run will not repeat this one" in killed.error
    folder = only_run(tmp_path / "runs")
    resized = execute("run", "--resume", str(folder), "--world-size", "3", "--resume-residuals", "sum", **told)
    assert (resized.code, "gives ranks different numbers of steps, so the run cannot" in resized.error) == (2, True)
    resumed = execute("run", "--resume", str(folder), **told)
    assert resumed.code == 0, resumed.error
    found = rows(folder)
    assert [(row["step"], row["samples"]) for row in found] == [(str(n), str(n * 2 * 2 * 16)) for n in (16, 32)]
    assert {row["replicas_in_sync"] for row in found} == {"true"}
    assert float(found[-1]["train_loss"]) < float(found[0]["train_loss"])
    assert float(found[-1]["control_bytes_per_step"]) > 0
