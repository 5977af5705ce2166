"""A rank's mini-batches without end, and where in them it is."""

from __future__ import annotations

from typing import Any

import torch

from bench.core.config.run import RunConfig
from bench.datasets.augment import crop_and_flip, normalise
from bench.datasets.base import Dataset, Part
from bench.train import shards


class Batches:
    """Epoch after epoch of one rank's shard, each in an order of its own.

    Args:
        config: of the run.
        dataset: says how pixels are brought to a common scale.
        train: all samples.
        rank: whose shard.
        device: where the batches go.
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
        self._rest: tuple[int, int, torch.Tensor] | None = (
            None  # (epoch, first batch, samples) shard_ids within an epoch
        )
        self._begin_epoch()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next one: fp32 [size, 3, 32, 32] and int64 [size], on the device."""
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
        """Batches used, the generator's state, and samples that were shard_ids anew within an epoch."""
        rest = None if self._rest is None else list(self._rest)
        return {"used": self._used, "generator": self._generator.get_state(), "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._used, rest = state["used"], state["rest"]
        self._rest = None if rest is None else tuple(rest)
        self._begin_epoch()
        self._generator.set_state(state["generator"])

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, from 0."""
        return max(0, self._used - 1) // self._per_epoch

    def unused(self) -> torch.Tensor:
        """Indices of the samples of the shard that were not used in this epoch; int64, none after its last batch."""
        position = self._used - self.epoch * self._per_epoch
        return self._order[: 0 if position == self._per_epoch else None][position * self._size :]

    def _begin_epoch(self) -> None:
        seed, epoch = self._config.seed, self.epoch
        self._order = shards.order(self._shard, seed=seed, rank=self._rank, epoch=epoch)
        self._generator = shards.augmentation_generator(seed, self._rank, epoch)
        if self._rest is not None and self._rest[0] == epoch:
            _, first, samples = self._rest
            self._order = torch.cat([samples.new_zeros(first * self._size), samples])  # nobody looks before the first
