"""Choose the samples that a rank uses, make batches of them, and evaluate the model on all ranks.

The ranks' shards may differ in size: no sample is repeated to make them equal. Every rank makes the same number of
steps per epoch: floor(size of the smallest shard / batch size).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from bench.core.config.run import RunConfig
from bench.core.processes import own_rank
from bench.datasets.base import IMAGE_SIZE, Dataset, DatasetError, Samples
from bench.models.base import pooled_buffers
from bench.rank import partition
from bench.rank.partition import random_generator


def steps_per_epoch(num_samples: int, world_size: int, batch_size: int) -> int:
    """Return the number of steps that every rank makes in an epoch; 0 if the smallest shard is smaller than a batch."""
    return num_samples // world_size // batch_size


def order(indices: torch.Tensor, *, seed: int, rank: int, epoch: int) -> torch.Tensor:
    """Return the sample indices of a rank's shard (int64), shuffled for the epoch with this number, from 0."""
    return indices[torch.randperm(len(indices), generator=random_generator(seed, rank + 1, epoch + 1))]


def evaluation_part(num_samples: int, rank: int, world_size: int) -> slice:
    """Return the slice of `num_samples` samples that a rank evaluates; the ranks' slices are disjoint and cover all."""
    return slice(num_samples * rank // world_size, num_samples * (rank + 1) // world_size)


def augmentation_generator(seed: int, rank: int, epoch: int) -> torch.Generator:
    """Return the generator of random crops and flips for one rank and epoch."""
    return random_generator(seed, rank + 1, -epoch - 1)


class Batches:
    """Iterates over one rank's shard without end, in a different order in each epoch.

    Args:
        config: the run's configuration.
        dataset: the data set, which augments and normalises batches.
        train: the training samples; those of the rank's shard must be in memory.
        shards: the partition of the training samples.
        rank: the rank that owns the shard.
        device: the device of the batches.

    Attributes:
        per_epoch: number of batches per epoch, the same for all shards.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        train: Samples,
        shards: Sequence[torch.Tensor],
        rank: int,
        device: torch.device,
    ) -> None:
        self._config = config
        self._dataset = dataset
        self._rank = rank
        self._device = device
        self._train = train.on(device)
        self._shard = shards[rank]
        self._size = config.samples_per_step
        self.per_epoch = min(map(len, shards)) // self._size
        self._used = 0
        # [epoch, number of a batch, samples] if the number of ranks changed in this epoch: from this batch on, these
        # samples replace the rest of the epoch
        self._rest: list[Any] | None = None
        self._begin_epoch()

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next batch on the device: (inputs of the network, targets), both [size, ...]."""
        position = self._used % self.per_epoch
        self._used += 1
        if position == 0:
            self._begin_epoch()
        inputs, targets = self._train.at(self._order[position * self._size : (position + 1) * self._size])
        inputs = inputs.to(self._device)  # lazy inputs are read on the CPU
        if self._config.augment:
            inputs = self._dataset.augment(inputs, self._generator)
        return self._dataset.normalise(inputs), targets

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches used, the random generator's state, and samples taken over from old ranks."""
        return {"used": self._used, "generator": self._generator.get_state(), "rest": self._rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        self._used, self._rest = state["used"], state["rest"]
        self._begin_epoch()
        self._generator.set_state(state["generator"])

    def go_to(self, step: int) -> None:
        """Continue with the batch for step `step` of the run, from 0; the rank must use one batch per step."""
        self._used = step
        self._begin_epoch()

    @property
    def epoch(self) -> int:
        """Return the number, from 0, of the epoch that the last batch belongs to; 0 before the first batch."""
        return max(0, self._used - 1) // self.per_epoch

    def unused(self) -> torch.Tensor:
        """Return int64 indices of the shard's samples that the current epoch has not used; empty at the epoch's end."""
        position = self._used - self.epoch * self.per_epoch
        return self._order[: 0 if position == self.per_epoch else None][position * self._size :]

    def _begin_epoch(self) -> None:
        seed, epoch = self._config.seed, self.epoch
        self._order = order(self._shard, seed=seed, rank=self._rank, epoch=epoch)
        self._generator = augmentation_generator(seed, self._rank, epoch)
        if self._rest is not None and self._rest[0] == epoch:
            _, first, samples = self._rest
            self._order = torch.cat([samples.new_zeros(first * self._size), samples])  # the zeros are never read


# Number of images of 32x32 pixels per evaluation batch. If samples are larger, a batch has fewer, so that the number of
# values in it stays the same.
EVALUATION_BATCH = 256
# Bytes of a text per evaluation batch; few, because a network holds many numbers for each byte.
EVALUATION_BYTES = 4096
# Number of training samples to evaluate: few enough to be cheap. At 97 % accuracy, the standard error is half a point.
TRAIN_SAMPLES = 1000


def check_inputs(inputs: torch.Tensor, found: str) -> None:
    """Raise DatasetError if inputs hold values that are NaN or infinite in fp32.

    Args:
        inputs: inputs of a network.
        found: the effect of such inputs, for the message, such as "the loss is nan".
    """
    if not bool(torch.isfinite(inputs.float()).all()):
        raise DatasetError(
            f"{found}, because the data hold NaN or infinite values, or values too large for fp32; repair these "
            "samples or leave them out"
        )


class Evaluation(NamedTuple):
    """A model's mean loss per prediction, in nats, and its share of correct predictions, 0 to 1, on some samples."""

    loss: float
    accuracy: float


def pool_running_statistics_(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Replace the running means and variances of BatchNorm with those of all ranks' samples together.

    Ranks see different samples, so their running statistics differ; only evaluation reads these statistics. Other
    floating-point buffers are averaged. Every rank of the group must call this function.
    """
    buffers = dict(model.named_buffers())
    norms = [name for name, module in model.named_modules() if isinstance(module, _BatchNorm)]
    variances = {f"{name}.running_var".removeprefix(".") for name in norms}
    for name, pooled in pooled_buffers(buffers, variances, functools.partial(_means, group=group)).items():
        buffers[name].copy_(pooled)


def _means(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    if not tensors:
        return []
    flat: torch.Tensor = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view_as(tensor).to(tensor.dtype) for part, tensor in zip(parts, tensors, strict=True)]


def train_sample(train: Samples) -> Samples:
    """Return the training samples to evaluate: always the same, with about the class shares of the whole set."""
    return train.subset(min(TRAIN_SAMPLES, len(train)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankData:
    """The samples that one rank trains and evaluates on.

    Attributes:
        train: the training samples.
        shards: the partition of the training samples: the indices of each replica's samples.
        fed: the numbers of the shards from which this rank makes batches.
        train_sample: the training samples to evaluate on.
        test: the test samples, or held-out training samples, to evaluate on.
        columns: columns of `metrics.csv` that describe the data, by name; they are the same in all rows.
    """

    train: Samples
    shards: Sequence[torch.Tensor]
    fed: Sequence[int]
    train_sample: Samples
    test: Samples
    columns: dict[str, float | None]

    @classmethod
    def of(cls, config: RunConfig, dataset: Dataset, train: Samples, test: Samples) -> RankData:
        """Return the data of this rank, with all samples in memory."""
        shards = partition.shards(train.targets, config.replicas, config.seed, config.partition)
        return cls(
            train=train,
            shards=shards,
            # A process that feeds all replicas makes the batches of all shards.
            fed=[own_rank()] if config.replicas == config.world_size else range(config.replicas),
            train_sample=train_sample(train),
            test=test,
            columns={
                "label_skew": partition.label_skew(train.targets, shards) if dataset.has_classes else None,
                "unused_samples": len(train) - sum(map(len, shards)),
            },
        )

    def own_part(self, group: dist.ProcessGroup | None, rest: Iterable[torch.Tensor]) -> RankData:
        """Return a copy with only those samples in memory that this rank trains and evaluates on.

        Args:
            group: the ranks that share the evaluation; None: all ranks.
            rest: int64 indices of further training samples to keep, which this rank takes over from other ranks.
        """
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)

        def evaluated(samples: Samples) -> Samples:
            return samples.keep(torch.arange(len(samples))[evaluation_part(len(samples), rank, num_ranks)])

        return dataclasses.replace(
            self,
            train=self.train.keep(torch.cat([*(self.shards[number] for number in self.fed), *rest]).unique()),
            train_sample=evaluated(self.train_sample),
            test=evaluated(self.test),
        )


@torch.no_grad()
def evaluate(
    model: nn.Module,
    parts: Sequence[Samples],
    dataset: Dataset,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    on_batch: Callable[[], object] = lambda: None,
) -> list[Evaluation]:
    """Return the model's mean loss and accuracy on each set of samples; the results are the same on every rank.

    The model is evaluated with running statistics (of BatchNorm) pooled over ranks. Afterwards, it is in training mode,
    and this rank's own statistics are restored; otherwise, each evaluation would make the ranks' statistics equal.
    Every rank of the group must call this function.

    Args:
        model: the network.
        parts: the sets of samples to evaluate on.
        dataset: the data set that the samples come from.
        device: the model's device.
        group: the ranks that share the work; None: all ranks.
        on_batch: called after every mini-batch.

    Raises:
        DatasetError: the samples hold NaN or infinite values.
    """
    own_buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    pool_running_statistics_(model, group)
    numel = dataset.dummy_batch(1, "meta").numel()
    size = max(1, min(EVALUATION_BATCH, EVALUATION_BATCH * 3 * IMAGE_SIZE**2 // numel))
    evaluations = []
    model.eval()
    for samples in parts:
        if samples.targets.dim() > 1:
            size = max(1, min(EVALUATION_BATCH, EVALUATION_BYTES // samples.targets[0].numel()))
        part = evaluation_part(len(samples), dist.get_rank(group), dist.get_world_size(group))
        totals = torch.zeros(2, dtype=torch.float64)  # sum of the losses, number of correct predictions
        for start in range(part.start, part.stop, size):
            chosen = slice(start, min(start + size, part.stop))
            inputs, targets = (each.to(device) for each in samples.at(chosen))
            loss, correct = dataset.task.sum_loss_and_correct(model(dataset.normalise(inputs)), targets)
            if not math.isfinite(total := float(loss)):
                check_inputs(inputs, f"the loss of an evaluation is {total}")
            totals += torch.stack([loss.cpu(), correct.double().cpu()])
            on_batch()
        totals = totals.to(device)
        dist.all_reduce(totals, group=group)
        loss, accuracy = (totals / samples.num_predictions).tolist()
        evaluations.append(Evaluation(loss=loss, accuracy=accuracy))
    model.train()
    for buffer, own in own_buffers:
        buffer.copy_(own)
    return evaluations
