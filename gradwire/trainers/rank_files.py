"""One file per rank beside a trainer's checkpoint, because trainers save what rank 0 has, and hooks differ by rank."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from collectives.transport.process_group import gather_json
from gradwire.exchange.packed_state import PackedState, load_state

FP16_REFUSED = (
    "fp16 with a gradient scaler is not supported here; train in bf16, or give the scaler to attach in a training loop "
    "of your own"
)


def rank_file(folder: str | os.PathLike[str], checkpoint: str = "") -> Path:
    """Return the path of this rank's file in a folder; `checkpoint` names the checkpoint, if the folder has several."""
    return Path(folder, f"gradwire-{dist.get_rank()}{'-' if checkpoint else ''}{checkpoint}.safetensors")


def save_rank(state: dict[str, Any], path: Path) -> None:
    """Write this rank's state to a file of its own; an older file is replaced at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    PackedState(state).save(partial)
    partial.replace(path)


def load_rank(path: Path, device: torch.device) -> dict[str, Any]:
    """Return what this rank's file holds; every rank must call this function.

    Raises:
        ValueError: a rank has no file, or the files were not saved at the same step.
    """
    state: dict[str, Any] = load_state(path, device) if path.is_file() else {}
    steps = gather_json(state.get("step"))
    if None in steps:
        raise ValueError(
            f"there is no state of rank {steps.index(None)} beside {path}; resume from a checkpoint that this many "
            "ranks saved, or load only its weights"
        )
    if len(set(steps)) > 1:
        raise ValueError(f"the files of the ranks beside {path} are of steps {steps}; resume from another checkpoint")
    return state
