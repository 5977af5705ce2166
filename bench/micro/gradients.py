"""Gradients to measure compressors on: made up, or recorded while a model trains in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import nn

from bench.core import spec
from bench.core.config.measurements import CompressorsConfig
from bench.core.errors import RunFailed
from bench.datasets.base import Dataset, normalise
from bench.optimizers.torch_optimizers import Sgd
from bench.train import data
from compressors.layer import Layer

SMALLEST_SCALE = 1e-3
STEPS_BEFORE = 5
BATCH_SIZE = 32


def synthetic(layers: Sequence[Layer], count: int, seed: int) -> list[torch.Tensor]:
    """Heavy-tailed noise around a mean that stays, each layer at a scale of its own between 0.001 and 1.

    Args:
        layers: whose shapes to fill.
        count: how many gradients.
        seed: the same seed gives the same gradients.

    Returns:
        fp32 [numel of all layers], in the given order.
    """
    generator = torch.Generator().manual_seed(seed)
    scales = SMALLEST_SCALE ** torch.rand(len(layers), generator=generator)
    means = [0.3 * torch.randn(layer.numel, generator=generator) for layer in layers]

    def one(mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(len(mean), generator=generator)
        return noise.mul_(noise.abs()).add_(mean).mul_(scale)

    return [torch.cat([one(mean, scale) for mean, scale in zip(means, scales, strict=True)]) for _ in range(count)]


def recorded(config: CompressorsConfig, model: nn.Module, layers: Sequence[Layer], count: int) -> list[torch.Tensor]:
    """The gradients of `count` training steps, after a few steps that let the first shock pass.

    Args:
        config: data set and seed.
        model: trained (mutated), with SGD at its default rate.
        layers: of the model.
        count: how many gradients.

    Returns:
        fp32 [numel of all layers], in the given order, on the model's device.

    Raises:
        RunFailed: a gradient is not finite.
    """
    parameters = [cast(nn.Parameter, layer.weight) for layer in layers]
    optimizer = Sgd().build(parameters, Sgd.default_lr)
    gradients = []
    for index, (x, y) in enumerate(_batches(config, parameters[0].device, STEPS_BEFORE + count)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        gradient = torch.cat([cast(torch.Tensor, p.grad).flatten() for p in parameters])
        if not bool(torch.isfinite(gradient).all()):
            raise RunFailed(f"the gradient of training step {index} is not finite; try another --seed or --model")
        if index >= STEPS_BEFORE:
            gradients.append(gradient)
        optimizer.step()
    return gradients


def _batches(
    config: CompressorsConfig, device: torch.device, count: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`count` batches: fp32 [batch, 3, 32, 32] and int64 [batch]."""
    dataset = cast(Dataset, spec.build("datasets", config.dataset))
    size = min(count * BATCH_SIZE, dataset.resolve_sizes(None, None)[0])
    train, _ = dataset.load(Path(config.data_dir), seed=config.seed, train_size=size, test_size=1)
    indices = data.shard(size, 0, 1, config.seed)
    per_epoch = data.steps_per_epoch(size, 1, BATCH_SIZE)
    for epoch in range(-(-count // per_epoch)):
        num_steps = min(per_epoch, count - epoch * per_epoch)
        for chosen in data.batches(indices, BATCH_SIZE, num_steps, seed=config.seed, rank=0, epoch=epoch):
            images = normalise(train.images[chosen].to(device), dataset.mean, dataset.std)
            yield images, train.labels[chosen].to(device)
