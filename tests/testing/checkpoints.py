"""A checkpoint without anything to continue training from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from bench.core.checkpoints import Checkpoints, Manifest
from bench.core.config.run import RunConfig
from bench.core.run_folder import RunFolder, write_json


def content(written: bytes) -> Callable[[Path], object]:
    """Return a function that writes these bytes to a file."""
    return lambda path: path.write_bytes(written)


def add_checkpoint(folder: RunFolder, config: RunConfig, step: int) -> None:
    """Write a checkpoint to a run's folder, together with its configuration."""
    write_json(folder.config, dataclasses.asdict(config))
    checkpoints = Checkpoints(folder)
    files = {0: checkpoints.write(step, 0, content(b"state"))}
    checkpoints.complete(
        Manifest(digest=config.digest, run_id=folder.run_id, step=step, world_size=1, files=files, rows={})
    )
