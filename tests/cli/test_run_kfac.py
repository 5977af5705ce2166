"""Real jobs with K-FAC: ranks stay equal, the cost of the factors is recorded, and both transfers train."""

from __future__ import annotations

from pathlib import Path

import pytest

from collectives.payloads.bundle import Bundle
from gradwire.optim.kronecker import owned
from tests.testing.invoke import invoke, only_run, rows

WORLD_SIZE, STEPS, EVERY = 2, 8, 3
MOMENTS = "kfac:inner=max_adabelief"
UPDATES = 3  # at steps 0, 3 and 6
# small_cnn with width 2 and 4 hidden units: inputs and outputs of each layer, biases in the fully connected ones.
SIZES = [27, 2, 18, 4, 36, 8, 72, 8, 129, 4, 5, 10]
HALVES = [size * (size + 1) // 2 for size in SIZES]

pytestmark = pytest.mark.usefixtures("forked_here")


def run(out: Path, optimizer: str) -> dict[str, str]:
    answer = invoke(
        "run", "--model", "small_cnn:width=2,hidden=4", "--optimizer", optimizer, "--steps", str(STEPS),
        "--train-size", "64", "--test-size", "32", "--batch-size", "8", "--threads", "1", "--out", str(out),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    (row,) = rows(only_run(out))
    assert row["replicas_in_sync"] == "true"
    assert row["factor_updates_skipped"] == "0"
    return row


@pytest.mark.long
def test_factors_travel_as_triangles_and_as_cholesky_factors(tmp_path: Path) -> None:
    triangle = run(tmp_path / "triangle", f"kfac:update_every={EVERY}")
    cholesky = run(tmp_path / "cholesky", f"kfac:update_every={EVERY},transfer=cholesky,collective=allgather")
    assert triangle["factor_fallbacks"] == cholesky["factor_fallbacks"] == "0"
    assert float(triangle["train_loss"]) == pytest.approx(float(cholesky["train_loss"]), rel=1e-3)
    shares = [Bundle.packed_nbytes([24 + 4 * HALVES[index] for index in share]) for share in owned(SIZES, WORLD_SIZE)]
    per_rank = 4 * sum(HALVES) + sum(shares) / WORLD_SIZE  # 2 (n - 1) / n of all triangles, and a share of the tree
    assert float(triangle["state_bytes_per_step"]) == pytest.approx(UPDATES * per_rank / STEPS)
    everything = Bundle.packed_nbytes([24 + 4 * half for half in HALVES])
    assert float(cholesky["state_bytes_per_step"]) == pytest.approx(UPDATES * everything / STEPS)
    assert triangle["payload_bytes_per_step"] == cholesky["payload_bytes_per_step"]


def test_moments_and_factors_are_booked_apart(tmp_path: Path) -> None:
    """Both moments count as gradient bytes and the factors as state, each as in a run without the other."""
    chosen = f"kfac:update_every={EVERY},transfer=cholesky,collective=ring"
    averaged = run(tmp_path / "averaged", f"{chosen},inner=max_adabelief:mode=gradient")
    moments = run(tmp_path / "moments", f"{chosen},inner=max_adabelief")
    assert float(moments["payload_bytes_per_step"]) == 2 * float(averaged["payload_bytes_per_step"]) > 0
    assert moments["state_bytes_per_step"] == averaged["state_bytes_per_step"]
    assert float(moments["state_bytes_per_step"]) > 0
    assert moments["factor_fallbacks"] == "0"
    assert moments["train_loss"] != averaged["train_loss"]


def test_without_factors_their_columns_are_empty(tmp_path: Path) -> None:
    answer = invoke(
        "run", "--model", "linear", "--steps", "2", "--train-size", "64", "--test-size", "32", "--batch-size", "8",
        "--threads", "1", "--out", str(tmp_path),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    (row,) = rows(only_run(tmp_path))
    assert (row["state_bytes_per_step"], row["factor_fallbacks"], row["factor_updates_skipped"]) == ("0.0", "", "")


@pytest.mark.usefixtures("planned_here")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--optimizer", "kfac:transfer=cholesky"], "; use collective=ring"),
        (["--optimizer", "kfac:inner=kfac"], "kfac: inner=kfac is not possible"),
        (["--optimizer", "kfac", "--strategy", "local"], "kfac sends data of its own between all ranks"),
        (["--optimizer", MOMENTS, "--strategy", "local"], "kfac sends data of its own between all ranks"),
        (["--optimizer", MOMENTS, "--accumulate", "2"], "kfac takes its factors from one batch's forward and backward"),
        (
            ["--optimizer", MOMENTS, "--bucket-mb", "1"],
            "--bucket-mb has no meaning with kfac, which sends no gradients",
        ),
        (
            ["--optimizer", MOMENTS, "--compressor", "torch_fp16"],
            "in their place; use compressor none",
        ),
        (["--optimizer", "kfac", "--compressor", "dgc"], "kfac has no momentum to hand over"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(arguments: list[str], sentence: str) -> None:
    answer = invoke("run", *arguments)
    assert answer.code == 2
    assert sentence in " ".join(answer.error.split())
