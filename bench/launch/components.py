"""Build the components of a run and check that they work together."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
from torch import nn

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import UsageError
from bench.datasets.base import IMAGE_SIZE, Dataset
from bench.models.base import Model, check_images
from bench.optimizers.base import Optimizer
from bench.strategies.base import Strategy
from collectives.base import Collective
from collectives.options import incompatibility
from compressors.base import Compressor
from compressors.layer import layers_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Components:
    """The six components of a run, each built and validated on its own; field names are option names."""

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    compressor: Compressor
    collective: Collective
    strategy: Strategy


def build_components(config: RunConfig) -> Components:
    """Build the six components.

    Raises:
        UsageError: a component or option is unknown, or a value is out of range.
    """
    strategy = cast(Strategy, spec.build("strategies", config.strategy))
    compressor = cast(Compressor, spec.build("compressors", config.compressor))
    collective = config.collective or _first_legal(strategy, compressor)
    return Components(
        model=cast(Model, spec.build("models", config.model)),
        dataset=cast(Dataset, spec.build("datasets", config.dataset)),
        optimizer=cast(Optimizer, spec.build("optimizers", config.optimizer)),
        compressor=compressor,
        collective=cast(Collective, spec.build("collectives", collective)),
        strategy=strategy,
    )


def model_without_values(parts: Components) -> nn.Module:
    """Return the network on the meta device, which has shapes and dtypes but no memory."""
    with torch.device("meta"):
        return parts.model.build(parts.dataset.num_classes)


def gradient_mb(parts: Components) -> float:
    """Return the size of the model's fp32 gradient in MiB, rounded to four digits."""
    model = model_without_values(parts)
    return float(f"{4 * sum(p.numel() for p in model.parameters() if p.requires_grad) / 2**20:.4g}")


def check_together(config: RunConfig, parts: Components) -> None:
    """Check that the components work together in this run.

    Raises:
        UsageError: they do not; the message names what would work.
    """
    with spec.usage_errors():
        parts.strategy.check_compatible(config, parts.compressor, parts.collective, parts.optimizer)
        parts.compressor.check_compatible(parts.collective)
        parts.optimizer.check_compatible(parts.compressor, parts.collective)
        parts.collective.check_ranks(config.replicas)
        if parts.compressor.owns_momentum:
            parts.optimizer.hand_over_momentum()


def check_network(config: RunConfig, parts: Components) -> None:
    """Check that the strategy and the compressor can train the network.

    Raises:
        UsageError: one of them cannot.
    """
    needed_mb = gradient_mb(parts)
    if parts.compressor.one_bucket and config.bucket_mb is not None and config.bucket_mb < needed_mb:
        raise UsageError(
            f"{config.compressor} needs the whole model in one bucket, and --bucket-mb {config.bucket_mb:g} is too "
            f"small for it; leave it out, or give {needed_mb:g} or more"
        )
    model = model_without_values(parts)
    if parts.dataset.image_size != IMAGE_SIZE and (
        reason := incompatibility(check_images, model, config.model, parts.dataset.image_size)
    ):
        raise UsageError(f"{reason}; use --model resnet50:stem=imagenet, or leave size out of --dataset")
    parts.strategy.examine(config, model)
    with spec.usage_errors():
        parts.compressor.check_layers(layers_of(model))


def _first_legal(strategy: Strategy, compressor: Compressor) -> str:
    """Return the first of the strategy's default collectives that works with the compressor; if none does, the last.

    `check_together` then refuses that one with the reason.
    """
    *rest, last = strategy.default_collectives(compressor)
    legal = (n for n in rest if not incompatibility(compressor.check_compatible, spec.build("collectives", n)))
    return next(legal, last)
