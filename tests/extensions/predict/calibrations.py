"""An artificial calibration with round numbers, so that predictions can be computed by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from bench.core import environment
from bench.extensions.predict.calibration import (
    LOCAL,
    VERSION,
    BucketParts,
    Calibration,
    CpuContention,
    EncodedBucket,
    LeafSize,
    MessageCosts,
    MessageProfile,
)
from bench.extensions.predict.script_profile import Profile

NUMEL = 125_000
DENSE = LeafSize(numel=NUMEL, nbytes=16 + 4 * NUMEL, wire_numel=NUMEL, wire_dtype="float32")
HALF = LeafSize(numel=NUMEL, nbytes=16 + 2 * NUMEL, wire_numel=NUMEL, wire_dtype="bfloat16")
SPARSE = LeafSize(numel=NUMEL, nbytes=16 + 5_000)
DENSER = LeafSize(numel=NUMEL, nbytes=16 + 100_000)  # in the first epoch


def calibration(**other: Any) -> Calibration:
    """Return two buckets of 125 000 elements, ready 0.1 s and 0.2 s after the start of backward in a step of 0.4 s."""
    encoded = {"none": (0.0, 0.0, DENSE), "bf16": (0.01, 0.01, HALF), "topk": (0.03, 0.01, SPARSE)}

    def buckets(before_s: float, after_s: float, leaf: LeafSize) -> tuple[EncodedBucket, ...]:
        offers = [(MessageProfile(leaves=(leaf,), layers=(number,)),) for number in range(2)]
        return tuple(EncodedBucket(work_s=(before_s, after_s), offers=each) for each in offers)

    figures: dict[str, Any] = {
        "version": VERSION,
        "cpu": environment.cpu_model(),
        "cores": environment.usable_cores(),
        "torch_version": "2.0",
        "kernels": environment.kernels(),
        "model": "small_cnn",
        "dataset": "digits",
        "optimizer": "sgd",
        "batch_size": 32,
        "threads": 1,
        "bucket_mb": 1.0,
        "batch_s": 0.05,
        "forward_s": 0.1,
        "backward_s": 0.2,
        "update_s": 0.05,
        "buckets": tuple(
            BucketParts(ready_s=ready_s, layers=(number,), numels=(NUMEL,)) for number, ready_s in enumerate((0.1, 0.2))
        ),
        "encoded": {name: buckets(*parts) for name, parts in encoded.items()},
        "first_epoch": {"topk": buckets(0.03, 0.01, DENSER)},
        "crowds": tuple(
            CpuContention(
                load=load,
                handed_over_s=(max(1.0, load) * 0.25, max(1.0, load) * 0.35),
                computed_s=max(1.0, load) * 0.35,
                cpu_s=0.35 + other.get("update_s", 0.05),
            )
            for load in (0.5, 1.0, 2.0)
        ),
        "messages": {LOCAL: MessageCosts()},
    }
    return Calibration(**figures | other)


def written(folder: Path, **other: Any) -> str:
    """Write the calibration to a file, and return its path."""
    path = folder / "calibration.json"
    dataclasses.replace(calibration(), **other).write(path)
    return str(path)


def written_profile(folder: Path) -> str:
    """Write a profile with the parts of `calibration` to a file, and return its path."""
    known = calibration()
    parts = {field.name: getattr(known, field.name) for field in dataclasses.fields(known)}
    path = folder / "profile.json"
    run = {"script": "train.py", "script_sha256": "0", "arguments": (), "world_size": 2, "micro_steps": 4}
    run |= {"warmup_steps": 5, "steps": 30}
    Profile(**parts, **run, step_s=0.4, exposed_s=0.0).write(path)
    return str(path)
