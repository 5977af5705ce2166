"""Compare the time of a checkpoint of ResNet-18 with writing as many bytes with dd; both are interleaved.

A checkpoint holds weights, momentum and residuals of two ranks, in one file per rank. Training waits only for the copy
in memory. Printed times are medians.

    python benchmarks/checkpoint_cost.py [--turns 9] [--folder ON_THE_DISK_IN_QUESTION]
"""

from __future__ import annotations

import argparse
import operator
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

from bench.core.checkpoints import Checkpoints, FileFacts, Manifest
from bench.core.run_folder import RunFolder
from bench.core.spec import build
from gradwire.exchange.packed_state import PackedState

RANKS = 2


def main() -> None:
    """Print the median times over the rounds in seconds, and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=9, help="number of rounds")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: a temporary folder)")
    options = parser.parse_args()
    state = state_of_a_rank()
    copies, writes, plain = [], [], []
    with tempfile.TemporaryDirectory(dir=options.folder) as path:
        folder = RunFolder(Path(path))
        nbytes = len(PackedState(state).to_tensor())
        for turn in range(1, options.turns + 1):
            started = time.perf_counter()
            packed = PackedState(state)
            copies.append(time.perf_counter() - started)
            writes.append(seconds_to_write(folder, turn, packed))
            plain.append(seconds_of_dd(folder.path, nbytes))
    ratio = statistics.median(write / other for write, other in zip(writes, plain, strict=True))
    print(f"{nbytes / 2**20:.0f} MiB per rank, {RANKS} files, {options.turns} rounds: copy in memory "
          f"{statistics.median(copies):.3f} s, checkpoint {statistics.median(writes):.3f} s, dd "
          f"{statistics.median(plain):.3f} s; checkpoint / dd {ratio:.2f}")  # fmt: skip


def state_of_a_rank() -> dict[str, object]:
    """Return a state as the training loop saves it with SGD's momentum and top-k's residuals."""
    model = build("models", "resnet18").build(10)  # type: ignore[attr-defined]
    weights = model.state_dict()
    parameters = dict(model.named_parameters())
    return {
        "model": weights,
        "momentum": {name: torch.randn_like(parameter) for name, parameter in parameters.items()},
        "residuals": {name: torch.randn_like(parameter) for name, parameter in parameters.items()},
    }


def seconds_to_write(folder: RunFolder, step: int, packed: PackedState) -> float:
    """Write a whole checkpoint and remove the previous one; return the seconds."""
    checkpoints = Checkpoints(folder)
    started = time.perf_counter()
    files: dict[int, FileFacts] = {rank: checkpoints.write(step, rank, packed.save) for rank in range(RANKS)}
    checkpoints.complete(Manifest(digest="", run_id="", step=step, world_size=RANKS, files=files, rows={}))
    checkpoints.remove(operator.lt, step)
    return time.perf_counter() - started


def seconds_of_dd(folder: Path, nbytes: int) -> float:
    """Write the same number of bytes to the same number of files with dd; return the seconds."""
    source = folder / "source"
    if not source.exists():
        source.write_bytes(os.urandom(nbytes))
    started = time.perf_counter()
    for rank in range(RANKS):
        line = ["dd", f"if={source}", f"of={folder / f'dd-{rank}'}", "bs=4M", "conv=fdatasync", "status=none"]
        subprocess.run(line, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
