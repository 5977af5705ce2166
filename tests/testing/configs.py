"""Run configurations for tests."""

from __future__ import annotations

from typing import Any

from bench.core.config.run import RunConfig

COMPONENTS = {
    "model": "linear",
    "dataset": "digits",
    "optimizer": "sgd",
    "compressor": "none",
    "collective": "native",
    "strategy": "ddp",
}


def make_config(**changes: Any) -> RunConfig:
    """Return a complete configuration of a small run with some fields changed."""
    fields: dict[str, Any] = {
        "name": "test",
        **COMPONENTS,
        "filled": COMPONENTS,
        "batch_size": 32,
        "epochs": 1,
        "eval_every": 1,
        "lr": 0.1,
        "lr_scaling": "none",
        "train_size": 64,
        "test_size": 32,
        "world_size": 2,
        "replicas": 2,
        "hosts": 1,
        "ranks_per_host": 2,
        "threads": 1,
        "device": "cpu",
    }
    return RunConfig(**(fields | changes))
