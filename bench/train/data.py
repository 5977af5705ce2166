"""Distribute training samples over ranks as shards, make batches of them, and evaluate the model on all ranks.

Shards are disjoint and cover the whole training set. No sample is repeated to make shards equally large, so their sizes
differ by at most one. Every rank makes the same number of steps per epoch: floor(size of the smallest shard / batch).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from bench.core.config.run import RunConfig
from bench.datasets.base import IMAGE_SIZE, Dataset, Samples


def shard(num_samples: int, rank: int, world_size: int, seed: int) -> torch.Tensor:
    """Return the rank's shard, int64 sample indices: every world_size-th of one random permutation of all samples."""
    return torch.randperm(num_samples, generator=_generator(seed, 0, 0))[rank::world_size]


def steps_per_epoch(num_samples: int, world_size: int, batch_size: int) -> int:
    """Return the number of steps that every rank makes in an epoch; 0 if the smallest shard is smaller than a batch."""
    return num_samples // world_size // batch_size


def order(indices: torch.Tensor, *, seed: int, rank: int, epoch: int) -> torch.Tensor:
    """Return the int64 sample indices of a rank's shard, shuffled for one epoch, which counts from 0."""
    return indices[torch.randperm(len(indices), generator=_generator(seed, rank + 1, epoch + 1))]


def evaluation_part(num_samples: int, rank: int, world_size: int) -> slice:
    """Return the slice of `num_samples` samples that a rank evaluates; the ranks' slices are disjoint and cover all."""
    return slice(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)


def augmentation_generator(seed: int, rank: int, epoch: int) -> torch.Generator:
    """Return the generator of random crops and flips for one rank and epoch."""
    return _generator(seed, rank + 1, -epoch - 1)


def _generator(seed: int, stream: int, epoch: int) -> torch.Generator:
    # A hash of the tuple, so that neighbouring seeds, ranks and epochs share no stream.
    mixed = seed & 0xFFFFFFFF
    for word in (stream, epoch):
        mixed = (mixed * 6364136223846793005 + (word & 0xFFFFFFFF) * 1442695040888963407 + 1) & 0x7FFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return torch.Generator().manual_seed(mixed)


class Batches:
    """Iterates over one rank's shard without end, in a different order in each epoch.

    Args:
        config: the run's configuration.
        dataset: the data set, which augments and normalises batches.
        train: all training samples.
        rank: the rank that owns the shard.
        device: the device of the batches.
    """

    def __init__(self, config: RunConfig, dataset: Dataset, train: Samples, rank: int, device: torch.device) -> None:
        self._config = config
        self._dataset = dataset
        self._rank = rank
        self._device = device
        self._train = train.on(device)
        self._shard = shard(len(train), rank, config.replicas, config.seed)
        self._size = config.samples_per_step
        self._per_epoch = steps_per_epoch(len(train), config.replicas, self._size)
        self._used = 0
        # epoch, first batch, samples: these replace the rest of an epoch after the number of ranks has changed
        self._rest: list[Any] | None = None
        self._begin_epoch()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch on the device: what the network gets and the targets, both [size, ...]."""
        position = self._used % self._per_epoch
        self._used += 1
        if position == 0:
            self._begin_epoch()
        chosen = self._order[position * self._size : (position + 1) * self._size].to(self._device)
        inputs = self._train.inputs[chosen].to(self._device)
        if self._config.augment:
            inputs = self._dataset.augment(inputs, self._generator)
        return self._dataset.normalise(inputs), self._train.targets[chosen]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches used, the random generator's state, and samples redistributed over new ranks."""
        return {"used": self._used, "generator": self._generator.get_state(), "rest": self._rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._used, self._rest = state["used"], state["rest"]
        self._begin_epoch()
        self._generator.set_state(state["generator"])

    @property
    def epoch(self) -> int:
        """Return the number, from 0, of the epoch that the last batch belongs to; 0 before the first batch."""
        return max(0, self._used - 1) // self._per_epoch

    def unused(self) -> torch.Tensor:
        """Return int64 indices of the shard's samples that the current epoch has not used; empty at the epoch's end."""
        position = self._used - self.epoch * self._per_epoch
        return self._order[: 0 if position == self._per_epoch else None][position * self._size :]

    def _begin_epoch(self) -> None:
        seed, epoch = self._config.seed, self.epoch
        self._order = order(self._shard, seed=seed, rank=self._rank, epoch=epoch)
        self._generator = augmentation_generator(seed, self._rank, epoch)
        if self._rest is not None and self._rest[0] == epoch:
            _, first, samples = self._rest
            self._order = torch.cat([samples.new_zeros(first * self._size), samples])  # earlier batches are never read


# Images of 32x32 pixels per evaluation batch; larger samples are fewer, with as many numbers in total.
EVALUATION_BATCH = 256
# Bytes of a text per evaluation batch, for each of which a network holds many numbers.
EVALUATION_BYTES = 4096
# Training samples to evaluate: few enough to be cheap; their accuracy is exact to half a point at 97 %.
TRAIN_SAMPLES = 1000


class Quality(NamedTuple):
    """A model's mean loss per prediction, in nats, and the share of right predictions, 0 to 1, on some samples."""

    loss: float
    accuracy: float


def average_running_statistics_(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Replace each rank's BatchNorm running mean and variance with their mean over the ranks of the group.

    Ranks see different samples, so their running statistics differ; training never reads them, evaluation does. Every
    rank of the group must call this function.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if not buffers:
        return
    flat: torch.Tensor = torch.cat([b.flatten() for b in buffers])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def train_sample(train: Samples) -> Samples:
    """Return the training samples to evaluate: always the same, with the classes in proportion to the training set."""
    return train.subset(min(TRAIN_SAMPLES, len(train)))


@torch.no_grad()
def evaluate(
    model: nn.Module,
    parts: Sequence[Samples],
    dataset: Dataset,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    on_batch: Callable[[], object] = lambda: None,
) -> list[Quality]:
    """Return the model's mean loss and accuracy on each set of samples; the results are the same on every rank.

    The model is left in training mode, with running statistics averaged over ranks. Every rank of the group must call
    this function.

    Args:
        model: the network.
        parts: the sets of samples to evaluate on.
        dataset: the data set that the samples come from.
        device: the model's device.
        group: the ranks that share the work; None: all ranks.
        on_batch: called after every mini-batch.
    """
    average_running_statistics_(model, group)
    numel = dataset.dummy_batch(1, "meta").numel()
    size = max(1, min(EVALUATION_BATCH, EVALUATION_BATCH * 3 * IMAGE_SIZE**2 // numel))
    qualities = []
    model.eval()
    for samples in parts:
        if samples.targets.dim() > 1:
            size = max(1, min(EVALUATION_BATCH, EVALUATION_BYTES // samples.targets[0].numel()))
        part = evaluation_part(len(samples), dist.get_rank(group), dist.get_world_size(group))
        totals = torch.zeros(2, dtype=torch.float64)  # sum of the losses, number of right predictions
        for start in range(part.start, part.stop, size):
            chosen = slice(start, min(start + size, part.stop))
            inputs, targets = samples.inputs[chosen].to(device), samples.targets[chosen].to(device)
            loss, correct = dataset.task.sum_loss_and_correct(model(dataset.normalise(inputs)), targets)
            totals += torch.stack([loss.cpu(), correct.double().cpu()])
            on_batch()
        totals = totals.to(device)
        dist.all_reduce(totals, group=group)
        loss, accuracy = (totals / samples.targets.numel()).tolist()
        qualities.append(Quality(loss=loss, accuracy=accuracy))
    model.train()
    return qualities
