"""Real jobs whose optimizers update hidden matrices, and the bytes in their rows."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.models.cnn import SmallCnn
from compressors.layer import layers_of
from gradwire.optim.matrices import hidden_layers
from tests.testing.invoke import invoke, only_run, rows

LAYERS = layers_of(SmallCnn().build(10))
HIDDEN = hidden_layers(LAYERS)

pytestmark = pytest.mark.usefixtures("forked_here")


def train(out: Path, *options: str) -> dict[str, str]:
    """Run a job on two ranks, and return its last row."""
    answer = invoke(
        "run", "--model", "small_cnn", "--train-size", "320", "--test-size", "64", "--batch-size", "16", "--steps",
        "6", "--collective", "ring", "--threads", "1", "--out", str(out), *options,
    )  # fmt: skip
    assert answer.code == 0, answer.error
    row = rows(only_run(out))[-1]
    assert row["replicas_in_sync"] == "true"
    return row


def test_dion_sends_factors(tmp_path: Path) -> None:
    row = train(tmp_path, "--optimizer", "dion:rank_fraction=0.1")
    numel = sum(layer.numel for layer in LAYERS)
    for layer in HIDDEN:
        out, rest = layer.shape[0], layer.numel // layer.shape[0]
        numel -= max(0, out * rest - (out + rest) * math.ceil(0.1 * min(out, rest)))
    assert float(row["payload_bytes_per_step"]) == 4 * numel
    assert float(row["state_bytes_per_step"]) == 0


def test_muon_sends_compressed_gradients_and_updated_matrices(tmp_path: Path) -> None:
    row = train(tmp_path, "--optimizer", "muon:shard=true", "--compressor", "bf16")
    assert float(row["payload_bytes_per_step"]) == 2 * sum(layer.numel for layer in LAYERS)
    assert float(row["state_bytes_per_step"]) == 4 * sum(layer.numel for layer in HIDDEN) / 2  # each from one rank
