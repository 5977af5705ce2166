"""Resume with a different number of ranks: make each new rank's state from the states of the old ranks.

State that is equal on all ranks is copied. Residuals (what waits to be sent) are averaged: a step applies the mean over
ranks of what they send, so if each new rank gets the mean of the old ranks' residuals, the same amount is applied in
the end. The samples that no rank has used in the current epoch are distributed again over the new ranks.

Steps are counted as if the run had always had the new number of ranks: an epoch now has another number of steps, and
learning rates, warm-ups and evaluations follow the epochs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import torch

from bench.core.config.run import RunConfig
from bench.datasets.base import Dataset, Part
from bench.train import shards
from bench.train.batches import Batches
from collectives.parameter_server.residuals import EVERY_RANK

Waiting = Literal["sum", "drop"]
State = dict[str, Any]


def resized(
    states: Sequence[State], config: RunConfig, rank: int, waiting: Waiting, dataset: Dataset, train: Part
) -> State:
    """Return the state with which a new rank resumes.

    Args:
        states: the old ranks' states, as the training loop saved them.
        config: the configuration with the new number of ranks.
        rank: the new rank.
        waiting: "sum" averages residuals over the old ranks, which keeps the sum that is applied; "drop" drops them.
        dataset: the run's data set.
        train: the training samples.
    """
    state = states[rank % len(states)]
    batches = _redistributed([each["batches"][0] for each in states], config, rank, dataset, train)
    counts = {name: value for name, value in state["counts"].items() if not name.endswith("_at")}
    strategy = state["strategy"] | {
        "exchange": _exchange([each["strategy"]["exchange"] for each in states], rank, config.world_size, waiting)
    }
    if config.steps is None:
        counts |= {"step": batches["used"], "own_steps": batches["used"]}
        strategy["num_steps"] = batches["used"]
    return state | {"strategy": strategy, "counts": counts, "batches": [batches]}


def _exchange(parts: Sequence[State], rank: int, world_size: int, waiting: Waiting) -> State:
    """Return the new state of an exchange, which may consist of two: of gradients, and of the optimizer."""
    own = parts[rank % len(parts)]
    if "gradients" in own:
        return {name: _exchange([part[name] for part in parts], rank, world_size, waiting) for name in own}
    if "reducer" not in own:  # DDP itself, which keeps nothing
        return own
    reducer = own["reducer"] | {
        name: _means([part["reducer"][name] for part in parts]) if waiting == "sum" else {}
        for name in ("residuals", "velocities")
    }
    return own | {
        "reducer": reducer,
        "collective": _server([part["collective"] for part in parts], world_size, waiting),
    }


def _means(by_rank: Sequence[dict[int, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Return the mean over ranks of each layer's tensor; a rank without the tensor counts as zeros."""
    keys = {key: None for tensors in by_rank for key in tensors}
    return {
        key: torch.stack([tensors[key] for tensors in by_rank if key in tensors]).sum(dim=0) / len(by_rank)
        for key in keys
    }


def _server(parts: Sequence[State], world_size: int, waiting: Waiting) -> State:
    """Return the new state of a collective's servers: each new rank gets all their residuals and keeps what it serves.

    These are residuals of sums over ranks, so they are scaled by the ratio of the numbers of ranks.
    """
    serving = next((part for part in parts if part.get("residuals")), parts[0])
    if not serving:
        return serving
    scale = world_size / len(parts)
    owed = {key: residual * scale for part in parts for key, residual in part["residuals"].items()}
    kept = owed if waiting == "sum" else {}
    return serving | {"residuals": kept, "keepers": dict.fromkeys(kept, EVERY_RANK)}


def _redistributed(saved: Sequence[State], config: RunConfig, rank: int, dataset: Dataset, train: Part) -> State:
    """Return a new rank's state of `Batches`, with its share of the samples left in this epoch."""
    before = dataclasses.replace(config, replicas=len(saved))
    rest = []
    for old_rank, state in enumerate(saved):
        batches = Batches(before, dataset, train, old_rank, torch.device("cpu"))
        batches.load_state_dict(state)
        rest.append(batches.unused())
    unused = shards.order(torch.cat(rest), seed=config.seed, rank=len(saved), epoch=batches.epoch)
    num_left = len(unused) // config.replicas // config.samples_per_step
    per_epoch = shards.steps_per_epoch(len(train), config.replicas, config.samples_per_step)
    used = (batches.epoch + 1) * per_epoch - num_left
    generator = shards.augmentation_generator(config.seed, rank, batches.epoch)
    return {
        "used": used,
        "generator": generator.get_state(),
        "rest": [batches.epoch, used % per_epoch, unused[rank :: config.replicas]] if num_left else None,
    }
