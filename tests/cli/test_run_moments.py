"""A real job whose optimizer exchanges moments, next to one that averages gradients."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tests.testing.invoke import invoke, only_run, rows

pytestmark = pytest.mark.usefixtures("forked_here")


def train(out: Path, optimizer: str, *more: str) -> dict[str, str]:
    """Run a job on two ranks, and return its last row."""
    answer = invoke(
        "run", "--model", "linear", "--train-size", "320", "--test-size", "64", "--batch-size", "16", "--epochs", "2",
        "--collective", "ring", "--optimizer", optimizer, "--threads", "1", "--out", str(out), *more,
    )  # fmt: skip
    assert answer.code == 0, answer.error
    return rows(only_run(out))[-1]


@pytest.mark.long
def test_two_exchanges_per_step_are_counted(tmp_path: Path) -> None:
    moments = train(tmp_path / "moments", "max_adabelief")
    gradient = train(tmp_path / "gradient", "max_adabelief:mode=gradient")
    for row in (moments, gradient):
        assert row["replicas_in_sync"] == "true"
        assert row["payload_bytes_source"] == "counted"
        assert float(row["test_accuracy"]) > 0.5
        assert float(row["exchange_s"]) >= float(row["encode_s"]) > 0
    assert float(moments["payload_bytes_per_step"]) == 2 * float(gradient["payload_bytes_per_step"])
    assert float(moments["effective_density"]) == 2 * float(gradient["effective_density"]) == 2


def test_compressed_means_and_whole_maxima_share_a_row(tmp_path: Path) -> None:
    row = train(tmp_path, "max_adabelief", "--compressor", "topk:ratio=0.01,value_dtype=fp32", "--trigger", "sync")
    assert row["replicas_in_sync"] == "true"
    with (only_run(tmp_path) / "layers.csv").open(encoding="utf-8") as file:
        layer = list(csv.DictReader(file))[-2]
    numel = int(layer["numel"])
    assert layer["payload"] == "Sparse+Dense"
    assert 4 * numel < float(layer["payload_bytes"]) < 5 * numel
    assert (float(layer["density_max"]), float(layer["density_of_wanted_max"])) == (1.0, pytest.approx(1.0, rel=0.1))
    assert float(layer["residual_norm"]) > 0
    assert int(row["held_bytes"]) >= 8 * numel  # the residual and the memory for its successor, in fp32


# Per step and rank, of a matrix [10, 3072] and a vector [10], in one bundle of 16 + 16 bytes and both payloads. demo:
# 48 chunks of 10 x 64 with 32 values and indices of 10 bits, and 10 values with a bitmap. onebit_adam: 15 368 bits to
# the other rank, and 15 352 and 10 bits from it, or the other way round.
DEMO = 32 + 24 + 48 * 32 * 4 + 1920 + 72
BITS = (28 + 1921) + 32 + (28 + 1919 + 5) + 32


@pytest.mark.parametrize(
    ("optimizer", "nbytes"),
    [
        ("demo", DEMO),
        ("onebit_adam:warmup_steps=10", BITS),
        # exchanges after steps 11, 12 and 16; the parameters that are evaluated at step 20 are those of step 16
        ("zero_one_adam:var_freeze_step=10,local_step_scaler=1,local_step_clipper=8", 0.3 * BITS),
    ],
)
def test_own_payloads_are_counted_and_evaluations_see_equal_parameters(
    optimizer: str, nbytes: float, tmp_path: Path
) -> None:
    row = train(tmp_path, optimizer, *(("--collective", "allgather") if optimizer == "demo" else ()))
    assert row["replicas_in_sync"] == "true"
    assert row["payload_bytes_source"] == "counted"
    assert float(row["payload_bytes_per_step"]) == pytest.approx(nbytes, abs=0.01)
    assert float(row["test_accuracy"]) > 0.5
