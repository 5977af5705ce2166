"""Artificial rows of metrics.csv, with which reading, comparing and printing are tested quickly, without training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.core.rows import RowWriter
from bench.report import store

DENSE_BYTES = 1_000_000.0


def fake_row(**values: Any) -> dict[str, Any]:
    """Return one evaluation of a run of a small model; every value can be replaced."""
    row: dict[str, Any] = {
        "compressor": "none",
        "collective": "native",
        "strategy": "ddp",
        "seed": 1,
        "name": "demo",
        "model": "small_cnn",
        "dataset": "digits",
        "train_size": 1347,
        "test_size": 450,
        "optimizer": "sgd",
        "trigger": "async",
        "world_size": 2,
        "batch_size": 32,
        "epochs": 2,
        "lr": 0.05,
        "device": "cpu",
        "threads": 1,
        "status": "ok",
        "epoch": 2.0,
        "step": 42,
        "test_accuracy": 0.97,
        "target_accuracy": 0.95,
        "time_to_target_s": 8.0,
        "samples_per_s": 1200.0,
        "step_time_s": 0.05,
        "exposed_s": 0.02,
        "payload_bytes_per_step": DENSE_BYTES,
        "dense_bytes_per_step": DENSE_BYTES,
        "compression_ratio": 1.0,
        "payload_bytes_source": "formula",
        "replicas_in_sync": True,
        "host": "lab-3",
        "cpu": "Example CPU, 2 cores",
        "torch_version": "2.14.1",
        "kernels": "native",
        "git_sha": "1a2b3c4",
        "git_dirty": False,
        "started_at": "2026-03-01T10:00:00Z",
    }
    row |= values
    row.setdefault("config_id", f"{row['compressor']}+{row['collective']}+{row['lr']}+{row['model']}")
    row.setdefault("run_id", f"{row['config_id']}-{row['seed']}-{row['started_at']}")
    return row


def fake_seeds(
    samples_per_s: Sequence[float], accuracy: Sequence[float] | None = None, **values: Any
) -> list[dict[str, Any]]:
    """Return one finished run per value, with seeds 1, 2, ..."""
    accuracies = accuracy or [0.97] * len(samples_per_s)
    return [
        fake_row(seed=seed, samples_per_s=speed, test_accuracy=share, **values)
        for seed, (speed, share) in enumerate(zip(samples_per_s, accuracies, strict=True), start=1)
    ]


def topk_seeds(
    samples_per_s: Sequence[float], accuracy: Sequence[float] | None = None, **values: Any
) -> list[dict[str, Any]]:
    """Return finished runs of top-k at 1 % over all-gather."""
    sparse = {
        "compressor": "topk:ratio=0.01",
        "collective": "allgather",
        "payload_bytes_per_step": DENSE_BYTES / 50,
        "compression_ratio": 50.0,
        "payload_bytes_source": "counted",
        "exposed_s": 0.001,
    }
    return fake_seeds(samples_per_s, accuracy, **(sparse | values))


def text_seeds(samples_per_s: Sequence[float], bits_per_byte: Sequence[float], **values: Any) -> list[dict[str, Any]]:
    """Return finished runs on a text, without a target; each predicts half of the bytes right."""
    text = {
        "model": "gpt",
        "dataset": "stdlib",
        "target_accuracy": None,
        "test_accuracy": 0.5,
        "gzip_bits_per_byte": 1.9712,
        "bz2_bits_per_byte": 1.7131,
        "xz_bits_per_byte": 1.5786,
    }
    return [
        fake_row(seed=seed, samples_per_s=speed, test_bits_per_byte=bits, **text | values)
        for seed, (speed, bits) in enumerate(zip(samples_per_s, bits_per_byte, strict=True), start=1)
    ]


def write_run(folder: Path, *rows: dict[str, Any]) -> Path:
    """Write a run folder with these rows in its metrics.csv."""
    folder.mkdir(parents=True)
    RowWriter(folder / "metrics.csv").extend(rows)
    return folder


def write_runs(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write one run folder per row."""
    for row in rows:
        write_run(folder / row["run_id"].replace("/", "_").replace(":", "_"), row)
    return folder


def stored(tmp_path: Path, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows as `store.read` returns them."""
    path = tmp_path / "rows.csv"
    path.unlink(missing_ok=True)
    RowWriter(path).extend(rows)
    return store.read([path])
