"""An endless iterator over a rank's mini-batches, whose position can be saved and restored."""

from __future__ import annotations

from typing import Any

import torch

from bench.core.config.run import RunConfig
from bench.datasets.augment import crop_and_flip, normalise
from bench.datasets.base import Dataset, Part
from bench.train import shards


class Batches:
    """Iterate over one rank's shard without end, in a different order in each epoch.

    Args:
        config: the run's configuration.
        dataset: gives the mean and standard deviation with which pixels are normalised.
        train: all training samples.
        rank: the rank that owns the shard.
        device: the device of the batches.
    """

    def __init__(self, config: RunConfig, dataset: Dataset, train: Part, rank: int, device: torch.device) -> None:
        self._config = config
        self._dataset = dataset
        self._rank = rank
        self._device = device
        self._images, self._labels = train.images.to(device), train.labels.to(device)
        self._shard = shards.shard(len(train), rank, config.replicas, config.seed)
        self._size = config.samples_per_step
        self._per_epoch = shards.steps_per_epoch(len(train), config.replicas, self._size)
        self._used = 0
        # (epoch, first batch, samples) that replace the rest of an epoch after the number of ranks has changed
        self._rest: tuple[int, int, torch.Tensor] | None = None
        self._begin_epoch()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch on the device: fp32 [size, 3, height, width] and int64 [size]."""
        position = self._used % self._per_epoch
        self._used += 1
        if position == 0:
            self._begin_epoch()
        chosen = self._order[position * self._size : (position + 1) * self._size].to(self._device)
        pixels = self._images[chosen]
        if self._config.augment:
            pixels = crop_and_flip(pixels, self._generator, flip=self._dataset.mirror)
        return normalise(pixels, self._dataset.mean, self._dataset.std), self._labels[chosen]

    def state_dict(self) -> dict[str, Any]:
        """Return the batches used, the generator's state, and samples that were redistributed within an epoch."""
        rest = None if self._rest is None else list(self._rest)
        return {"used": self._used, "generator": self._generator.get_state(), "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._used, rest = state["used"], state["rest"]
        self._rest = None if rest is None else tuple(rest)
        self._begin_epoch()
        self._generator.set_state(state["generator"])

    @property
    def epoch(self) -> int:
        """Return the epoch of the last batch, which counts from 0."""
        return max(0, self._used - 1) // self._per_epoch

    def unused(self) -> torch.Tensor:
        """Return int64 indices of the shard's samples that this epoch has not used; empty after its last batch."""
        position = self._used - self.epoch * self._per_epoch
        return self._order[: 0 if position == self._per_epoch else None][position * self._size :]

    def _begin_epoch(self) -> None:
        seed, epoch = self._config.seed, self.epoch
        self._order = shards.order(self._shard, seed=seed, rank=self._rank, epoch=epoch)
        self._generator = shards.augmentation_generator(seed, self._rank, epoch)
        if self._rest is not None and self._rest[0] == epoch:
            _, first, samples = self._rest
            self._order = torch.cat([samples.new_zeros(first * self._size), samples])  # earlier batches are never read
