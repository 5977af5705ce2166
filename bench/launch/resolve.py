"""From what `bench run` was asked for to a complete, checked `RunConfig`.

Everything that can be refused is refused here, before any process starts; what numbers alone show, before torch is
imported.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bench.core import spec
from bench.core.config import DEFAULT_EPOCHS, RunConfig
from bench.core.errors import UsageError
from bench.core.straggler import Straggler
from bench.launch.placement import check_machines, place


def resolve(asked: RunConfig) -> RunConfig:
    """The run's configuration with every default filled in.

    Raises:
        UsageError: something is unknown, illegal together, or impossible here or with this data.
    """
    if asked.epochs and asked.steps:
        raise UsageError("--epochs and --steps both set the length of the run; give one of them")
    config = place(asked)
    check_machines(config)
    _check_straggler(config)
    from bench.launch.components import build_components, check_together, gradient_mb
    from bench.launch.devices import choose_device

    parts = build_components(config)
    train_size, test_size = parts.dataset.resolve_sizes(config.train_size, config.test_size)
    _check_shards(config.batch_size, config.world_size, train_size, test_size)
    chosen = vars(parts)
    short: dict[str, Any] = {name: spec.short_text(component) for name, component in chosen.items()}
    config = dataclasses.replace(
        config,
        **short,
        filled={name: spec.full_text(component) for name, component in chosen.items()},
        device=choose_device(config.device),
        train_size=train_size,
        test_size=test_size,
        data_dir=str(Path(config.data_dir).absolute()),
    ).choose(
        name=_name(short),
        epochs=None if config.steps else DEFAULT_EPOCHS,
        eval_every=0 if config.steps else 1,
        lr=parts.optimizer.default_lr,
        bucket_mb=parts.strategy.default_bucket_mb(gradient_mb(parts)),
    )
    check_together(config, parts)
    return config


def _check_straggler(config: RunConfig) -> None:
    if config.straggler and Straggler.parse(config.straggler).rank >= config.world_size:
        raise UsageError(
            f"--straggler {config.straggler} names none of the {config.world_size} ranks; they count from 0"
        )


def _check_shards(batch_size: int, world_size: int, train_size: int, test_size: int) -> None:
    smallest = train_size // world_size
    for part, size in (("training", train_size), ("test", test_size)):
        if size < world_size:
            raise UsageError(f"{size} {part} samples cannot be divided over {world_size} ranks; lower --world-size")
    if smallest < batch_size:
        raise UsageError(
            f"--batch-size {batch_size} is larger than a rank's shard of {smallest} samples "
            f"({train_size} over {world_size} ranks); lower --batch-size or --world-size"
        )


def _name(short: dict[str, str]) -> str:
    kinds = ["model", "dataset", "compressor", "collective"]
    if short["strategy"] != RunConfig.strategy:
        kinds.append("strategy")
    return "-".join(short[kind].partition(":")[0] for kind in kinds)
