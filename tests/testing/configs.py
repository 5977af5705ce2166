"""Run configurations for tests."""

from __future__ import annotations

from typing import Any

from bench.core.config import RunConfig


def make_config(**changes: Any) -> RunConfig:
    """A complete configuration of a small run, with the fields that a test cares about changed."""
    components = {
        "model": "linear",
        "dataset": "digits",
        "optimizer": "sgd",
        "compressor": "none",
        "collective": "native",
        "strategy": "ddp",
    }
    fields: dict[str, Any] = {
        "name": "test",
        **components,
        "filled": components,
        "epochs": 1,
        "lr": 0.1,
        "train_size": 64,
        "test_size": 32,
        "ranks_per_host": 2,
        "data_dir": "data",
    }
    return RunConfig(**(fields | changes))
