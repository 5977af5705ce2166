"""Artificial runs for pictures: several evaluations per run, and layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report.plots.results import Results
from tests.testing.fake_rows import fake_row, stored

EXCHANGE = {"forward_backward_s": 0.03, "encode_s": 0.002, "exchange_s": 0.012, "exposed_s": 0.01}


def fake_run(accuracies: Sequence[float], *, target: float | None = 0.9, **values: Any) -> list[dict[str, Any]]:
    """Return a run with an evaluation every 10 steps and 2 s; the accuracies decide when the target is reached."""
    reached = next((i for i, share in enumerate(accuracies, 1) if target is not None and share >= target), None)
    last = len(accuracies)
    return [
        fake_row(
            **EXCHANGE
            | {
                "epochs": float(last),
                "epoch": float(i),
                "step": 10 * i,
                "train_time_s": 2.0 * i,
                "test_accuracy": share,
                "status": "ok" if i == last else "running",
                "target_accuracy": target,
                "time_to_target_s": 2.0 * reached if reached and i >= reached else None,
            }
            | values
        )
        for i, share in enumerate(accuracies, 1)
    ]


def fake_text_run(bits_per_byte: Sequence[float], *, target: float | None = 2.1, **values: Any) -> list[dict[str, Any]]:
    """Return a run on a text like `fake_run`; its accuracy falls while its bits per byte fall, so neither hides."""
    reached = next((i for i, bits in enumerate(bits_per_byte, 1) if target is not None and bits <= target), None)
    rows = fake_run([0.5 - 0.01 * i for i in range(len(bits_per_byte))], target=None, dataset="stdlib", **values)
    for i, (row, bits) in enumerate(zip(rows, bits_per_byte, strict=True), 1):
        to_target = 2.0 * reached if reached and i >= reached else None
        row |= {"test_bits_per_byte": bits, "target_bits_per_byte": target, "time_to_target_s": to_target}
    return rows


def fake_layers(rows: Sequence[dict[str, Any]], density: float) -> list[dict[str, Any]]:
    """Return two layers per evaluation, the second one always sent whole."""
    return [
        {"run_id": row["run_id"], "epoch": row["epoch"], "step": row["step"], "layer": layer, "density_mean": share}
        for row in rows
        for layer, share in (("conv.weight", density), ("conv.bias", 1.0))
    ]


def everything() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return rows and layers from which every kind of picture can be drawn; one seed misses its target."""
    rows, layers = [], []
    for compressor, bytes_per_step, factor, density in (("none", 1e6, 1.0, 1.0), ("topk:ratio=0.01", 2e4, 2.0, 0.01)):
        for uplink in (1e7, 1e8):
            for world_size in (2, 4):
                for seed in (1, 2):
                    slow = compressor != "none" and seed == 2
                    run = fake_run(
                        [0.5, 0.7, 0.8] if slow else [0.5, 0.8, 0.95],
                        compressor=compressor,
                        collective="native" if compressor == "none" else "allgather",
                        seed=seed,
                        world_size=world_size,
                        ranks_per_host=world_size,
                        replicas=world_size,
                        threads=4 // world_size,
                        uplink_bps=uplink,
                        payload_bytes_per_step=bytes_per_step,
                        samples_per_s=100.0 * world_size * (factor if uplink == 1e7 else 0.9 / factor),
                        config_id=f"{compressor}{uplink}{world_size}",
                    )
                    rows += run
                    layers += fake_layers(run, density)
    return rows, layers


def results(
    tmp_path: Path, rows: Sequence[dict[str, Any]], layers: Sequence[dict[str, Any]] = (), **more: Any
) -> Results:
    """Return the rows in the form that pictures take."""
    return Results(rows=stored(tmp_path, rows), layers=list(layers), **more)
