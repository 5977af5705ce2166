"""Evaluation on the test set and on some training samples: each rank takes a disjoint part, and counts are exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from bench.datasets.augment import normalise
from bench.datasets.base import IMAGE_SIZE, Dataset, Part
from bench.train.data import evaluation_part

# Images of 32x32 pixels per evaluation batch; larger images are fewer, with as many pixels in total.
EVALUATION_BATCH = 256
# Training samples to evaluate: few enough to be cheap; their accuracy is exact to half a point at 97 %.
TRAIN_SAMPLES = 1000


class Quality(NamedTuple):
    """A model's mean loss and accuracy (0 to 1) on some samples."""

    loss: float
    accuracy: float


def average_running_statistics_(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Replace each rank's BatchNorm running mean and variance by their mean over ranks; every rank must call.

    Ranks see different samples, so their running statistics differ; training never reads them, evaluation does.
    """
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    if not buffers:
        return
    flat: torch.Tensor = torch.cat([b.flatten() for b in buffers])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for buffer, part in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))


def train_sample(train: Part) -> Part:
    """Return the training samples to evaluate: the same ones every time, with the training set's shares of classes."""
    return train.subset(min(TRAIN_SAMPLES, len(train)))


def evaluate(
    model: nn.Module,
    parts: Sequence[Part],
    dataset: Dataset,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    on_batch: Callable[[], object] = lambda: None,
) -> list[Quality]:
    """Return the model's loss and accuracy on each part, equal on every rank; every rank of the group must call.

    The model is left in training mode, with averaged running statistics.

    Args:
        model: the network.
        parts: the sets of samples to evaluate on.
        dataset: the data set that the samples come from.
        device: the model's device.
        group: the ranks that share the work; None: all ranks.
        on_batch: called after every mini-batch.
    """
    average_running_statistics_(model, group)
    model.eval()
    qualities = [_quality(model, part, dataset, device, group, on_batch) for part in parts]
    model.train()
    return qualities


@torch.no_grad()
def _quality(
    model: nn.Module,
    samples: Part,
    dataset: Dataset,
    device: torch.device,
    group: dist.ProcessGroup | None,
    on_batch: Callable[[], object],
) -> Quality:
    part = evaluation_part(len(samples), dist.get_rank(group), dist.get_world_size(group))
    images, labels = samples.images[part], samples.labels[part]
    totals = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of correct predictions
    size = max(1, min(EVALUATION_BATCH, EVALUATION_BATCH * IMAGE_SIZE**2 // dataset.image_size**2))
    for start in range(0, len(labels), size):
        x = normalise(images[start : start + size].to(device), dataset.mean, dataset.std)
        y = labels[start : start + size].to(device)
        logits = model(x)
        totals[0] += nn.functional.cross_entropy(logits, y, reduction="sum").double().cpu()
        totals[1] += (logits.argmax(1) == y).sum().cpu()
        on_batch()
    totals = totals.to(device)
    dist.all_reduce(totals, group=group)
    loss, accuracy = (totals / len(samples)).tolist()
    return Quality(loss=loss, accuracy=accuracy)
