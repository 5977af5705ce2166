"""Evaluation: all ranks, disjoint parts of the test set, exact counts."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from bench.datasets.augment import normalise
from bench.datasets.base import Dataset, Part
from bench.train.shards import evaluation_part

EVALUATION_BATCH = 256


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


@torch.no_grad()
def evaluate(
    model: nn.Module, test: Part, dataset: Dataset, device: torch.device, group: dist.ProcessGroup | None = None
) -> tuple[float, float]:
    """(mean loss, accuracy 0..1) over the whole test set, equal on every rank of the group; all of them must call.

    Leaves the model in training mode with averaged running statistics.
    """
    average_running_statistics_(model, group)
    model.eval()
    part = evaluation_part(len(test), dist.get_rank(group), dist.get_world_size(group))
    images, labels = test.images[part], test.labels[part]
    totals = torch.zeros(2, dtype=torch.float64)  # sum of losses, number right
    for start in range(0, len(labels), EVALUATION_BATCH):
        x = normalise(images[start : start + EVALUATION_BATCH].to(device), dataset.mean, dataset.std)
        y = labels[start : start + EVALUATION_BATCH].to(device)
        logits = model(x)
        totals[0] += nn.functional.cross_entropy(logits, y, reduction="sum").double().cpu()
        totals[1] += (logits.argmax(1) == y).sum().cpu()
    model.train()
    totals = totals.to(device)
    dist.all_reduce(totals, group=group)
    loss, right = (totals / len(test)).tolist()
    return loss, right
