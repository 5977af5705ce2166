"""The distribution of samples: which rank trains on which samples, and in which order.

Shards are disjoint and cover the whole set. No sample is repeated to make them equal, so sizes differ by at most one.
Every rank runs the same number of steps per epoch: floor(smallest shard / batch).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch


def shard(num_samples: int, rank: int, world_size: int, seed: int) -> torch.Tensor:
    """Return int64 indices of the samples that `rank` trains on: every world_size-th of one seeded permutation."""
    return torch.randperm(num_samples, generator=_generator(seed, 0, 0))[rank::world_size]


def steps_per_epoch(num_samples: int, world_size: int, batch_size: int) -> int:
    """Return the steps that every rank can make in an epoch; 0 if the smallest shard is smaller than a batch."""
    return num_samples // world_size // batch_size


def batches(
    indices: torch.Tensor, batch_size: int, num_steps: int, *, seed: int, rank: int, epoch: int
) -> Iterator[torch.Tensor]:
    """Yield `num_steps` batches of sample indices, int64 [batch_size], from the shard as shuffled for this epoch."""
    shuffled = order(indices, seed=seed, rank=rank, epoch=epoch)
    for step in range(num_steps):
        yield shuffled[step * batch_size : (step + 1) * batch_size]


def order(indices: torch.Tensor, *, seed: int, rank: int, epoch: int) -> torch.Tensor:
    """Return the rank's shard, int64 sample indices, as shuffled for this epoch."""
    return indices[torch.randperm(len(indices), generator=_generator(seed, rank + 1, epoch + 1))]


def evaluation_part(num_samples: int, rank: int, world_size: int) -> slice:
    """Return the contiguous part of the test set that `rank` evaluates; the parts are disjoint and cover the set."""
    return slice(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)


def augmentation_generator(seed: int, rank: int, epoch: int) -> torch.Generator:
    """Return the generator for random crops and flips."""
    return _generator(seed, rank + 1, -epoch - 1)


def _generator(seed: int, stream: int, epoch: int) -> torch.Generator:
    # A hash of the tuple, so that neighbouring seeds, ranks and epochs share no stream.
    mixed = seed & 0xFFFFFFFF
    for word in (stream, epoch):
        mixed = (mixed * 6364136223846793005 + (word & 0xFFFFFFFF) * 1442695040888963407 + 1) & 0x7FFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return torch.Generator().manual_seed(mixed)
