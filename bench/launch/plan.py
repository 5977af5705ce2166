"""From a request to a complete, checked `RunConfig`.

Everything that can be refused is refused here, before any process starts.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import cast

import torch

from bench.core import spec
from bench.core.config import RunConfig
from bench.core.errors import UsageError
from bench.core.request import DEFAULT_EPOCHS, Request
from bench.core.straggler import Straggler
from bench.datasets.base import Dataset
from bench.launch.old_spellings import refuse_old_spelling
from bench.launch.placement import check_machines, place
from bench.models.base import Model
from bench.optimizers.base import Optimizer
from bench.strategies.base import Strategy
from collectives.base import Collective
from collectives.options import OptionError
from compressors.base import Compressor
from compressors.layer import layers_of
from compressors.pairs import refusal
from compressors.plan import PlannedLayer
from compressors.plan import plan as compressor_plan

KINDS = ("model", "dataset", "optimizer", "compressor", "collective", "strategy")
# What a user writes of links; the configuration holds the cluster that comes of it.
LINK_OPTIONS = frozenset({"network", "bandwidth", "uplink", "downlink", "latency", "jitter", "loss"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Components:
    """The six components of a run, each built and validated by itself."""

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    compressor: Compressor
    collective: Collective
    strategy: Strategy


def plan(request: Request) -> RunConfig:
    """The run's configuration with every default filled in.

    Raises:
        UsageError: something is unknown, out of range, illegal together, or impossible here or with this data.
    """
    parts = components(request)
    _check_numbers(request)
    placement = place(request, request.nnodes)
    check_machines(request)
    train_size, test_size = parts.dataset.resolve_sizes(request.train_size, request.test_size)
    _check_shards(request.batch_size, placement.world_size, train_size, test_size)
    device = "cpu" if placement.cluster else _device(request.device)
    chosen = {kind: getattr(parts, kind) for kind in KINDS}
    short = {kind: spec.short_text(component) for kind, component in chosen.items()}
    given = {k: v for k, v in dataclasses.asdict(request).items() if k not in LINK_OPTIONS} | short
    given |= dataclasses.asdict(placement) | {
        "name": request.name or _name(short),
        "filled": {kind: spec.full_text(component) for kind, component in chosen.items()},
        "epochs": request.epochs or (None if request.steps else DEFAULT_EPOCHS),
        "eval_every": request.eval_every if request.eval_every is not None else (0 if request.steps else 1),
        "lr": request.lr if request.lr is not None else parts.optimizer.default_lr,
        "device": device,
        "straggler": _straggler(request.straggler, placement.world_size),
        "train_size": train_size,
        "test_size": test_size,
        "data_dir": str(Path(request.data_dir).absolute()),
    }
    config = RunConfig(**given)
    _check_together(config, parts)
    return config


def components(request: Request) -> Components:
    """Build the six components.

    Raises:
        UsageError: unknown component or option, or a value out of range.
    """
    strategy = cast(Strategy, spec.build("strategies", request.strategy))
    compressor = cast(Compressor, spec.build("compressors", request.compressor))
    if request.collective is not None:
        refuse_old_spelling(request.collective)
    collective = request.collective or _first_legal(strategy, compressor)
    return Components(
        model=cast(Model, spec.build("models", request.model)),
        dataset=cast(Dataset, spec.build("datasets", request.dataset)),
        optimizer=cast(Optimizer, spec.build("optimizers", request.optimizer)),
        compressor=compressor,
        collective=cast(Collective, spec.build("collectives", collective)),
        strategy=strategy,
    )


def prepare_data(config: RunConfig) -> None:
    """Make sure that the data set can be loaded by every rank, downloading it where it is absent.

    Raises:
        UsageError: it is absent and cannot be fetched, or it is damaged.
    """
    dataset = cast(Dataset, spec.build("datasets", config.filled["dataset"]))
    if not dataset.is_present(Path(config.data_dir)):
        dataset.prepare(Path(config.data_dir))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What the compressor would do to the model's layers.

    Attributes:
        layers: one row per parameter.
        dense_nbytes: the whole gradient in fp32.
        sent_nbytes: one rank's packed payload of the whole model at full compression, as one bucket; None where it
            depends on the data.
        warnings: what the user should know about this choice, one sentence each.
    """

    layers: list[PlannedLayer]
    dense_nbytes: int
    sent_nbytes: int | None
    warnings: list[str]


def plan_layers(config: RunConfig) -> LayerPlan:
    """What would be compressed and how, from shapes alone."""
    dataset = cast(Dataset, spec.build("datasets", config.filled["dataset"]))
    compressor = cast(Compressor, spec.build("compressors", config.filled["compressor"]))
    with torch.device("meta"):
        model = cast(Model, spec.build("models", config.filled["model"])).build(dataset.num_classes)
    layers = layers_of(model)
    rows = compressor_plan(compressor, layers)
    return LayerPlan(
        layers=rows,
        dense_nbytes=sum(row.dense_nbytes for row in rows),
        sent_nbytes=compressor.expected_bucket_nbytes(layers),
        warnings=compressor.warnings(),
    )


def _straggler(text: str | None, world_size: int) -> str | None:
    """As it was asked for, written in one way."""
    if text is None:
        return None
    straggler = Straggler.parse(text)
    if straggler.rank >= world_size:
        raise UsageError(f"--straggler {text} names none of the {world_size} ranks; they count from 0")
    return str(straggler)


def _check_together(config: RunConfig, parts: Components) -> None:
    """Refuse components that cannot work together in this run, for the reason that leads to one that can."""
    reason = (
        parts.strategy.refusal(config, parts.compressor, parts.collective)
        or refusal(parts.compressor, parts.collective)
        or parts.collective.ranks_refusal(config.world_size)
    )
    if reason:
        raise UsageError(reason)
    if parts.compressor.owns_momentum:
        try:
            parts.optimizer.hand_over_momentum()
        except OptionError as error:
            raise UsageError(str(error)) from None


def _first_legal(strategy: Strategy, compressor: Compressor) -> str:
    """The first of the strategy's own collectives that takes what is sent; the last if none does, and says why."""
    *rest, last = strategy.default_collectives
    legal = (n for n in rest if refusal(compressor, cast(Collective, spec.build("collectives", n))) is None)
    return next(legal, last)


def _check_numbers(request: Request) -> None:
    if request.epochs and request.steps:
        raise UsageError("--epochs and --steps both set the length of the run; give one of them")
    if request.lr is not None and not (math.isfinite(request.lr) and request.lr > 0):
        raise UsageError(f"--lr {request.lr} is not a learning rate; give a positive number")


def _check_shards(batch_size: int, world_size: int, train_size: int, test_size: int) -> None:
    smallest = train_size // world_size
    for part, size in (("training", train_size), ("test", test_size)):
        if size < world_size:
            raise UsageError(f"{size} {part} samples cannot be divided over {world_size} ranks; lower --world-size")
    if smallest < batch_size:
        raise UsageError(
            f"--batch-size {batch_size} is larger than a rank's shard of {smallest} samples "
            f"({train_size} over {world_size} ranks); lower --batch-size or --world-size"
        )


def _device(device: str) -> str:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError("torch sees no CUDA device on this machine; use --device cpu, or auto")
    return "cuda" if available and device != "cpu" else "cpu"


def _name(short: dict[str, str]) -> str:
    kinds = ["model", "dataset", "compressor", "collective"]
    if short["strategy"] != Request.strategy:
        kinds.append("strategy")
    return "-".join(short[kind].partition(":")[0] for kind in kinds)
