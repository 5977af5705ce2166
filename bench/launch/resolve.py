"""From what `bench run` was asked for to complete, checked configurations.

Everything that can be refused is refused here, before any rank starts; what numbers alone show, before torch is
imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core import spec
from bench.core.config.lr_scaling import LrScaling
from bench.core.config.run import DEFAULT_EPOCHS, RunConfig
from bench.core.config.straggler import Straggler
from bench.core.errors import UsageError
from bench.core.topology import Topology
from bench.costs.catalog import SHM, Catalog, folders
from bench.launch.jobs.placement import check_machines, place

if TYPE_CHECKING:
    from bench.launch.components import Components


def prepare(asked: RunConfig, seeds: Sequence[int]) -> tuple[list[RunConfig], list[str]]:
    """Do everything that needs torch before ranks can start; an absent data set is fetched.

    Returns:
        (a run's configuration per seed, what the user should know about this choice: one sentence each)

    Raises:
        UsageError: something is unknown, illegal together, or impossible here or with this data.
    """
    config = resolve(asked)
    return [dataclasses.replace(config, seed=seed) for seed in seeds], make_ready(config)


def make_ready(config: RunConfig) -> list[str]:
    """Fetch the data set of a complete configuration where it is absent.

    Returns:
        what the user should know about this choice: one sentence each

    Raises:
        UsageError: the model is impossible for the strategy.
    """
    from bench.launch.components import build_components, model_without_values

    parts = build_components(config)
    data_dir = Path(config.data_dir)
    if not parts.dataset.is_present(data_dir):
        parts.dataset.prepare(data_dir)
    of_strategy = parts.strategy.examine(config, model_without_values(parts))
    of_run = _checkpoint_warnings(config) + _target_warnings(config) + _profile_warnings(config)
    return parts.compressor.warnings() + _scaling_notes(config, parts) + of_strategy + of_run


def _scaling_notes(config: RunConfig, parts: Components) -> list[str]:
    """Say that the learning rate is scaled where the compressor, not the user, may have chosen that."""
    chosen = parts.compressor.default_lr_scaling
    if chosen == "none" or config.lr_scaling != chosen or config.replicas == 1:
        return []
    scaled = config.lr * LrScaling.parse(chosen).factor(config.replicas)
    return [
        f"{config.compressor} scales the learning rate linearly, as its document does: {config.lr:g} x "
        f"{config.replicas} ranks = {scaled:g}; where {config.lr:g} was tuned on N ranks add --lr-scaling "
        "linear:base=N, and to keep it --lr-scaling none"
    ]


def _target_warnings(config: RunConfig) -> list[str]:
    """Whether the time to a target would be that of the whole run."""
    if config.target_accuracy is None or config.eval_every:
        return []
    return ["--target-accuracy with one evaluation, at the end, tells no time to it; add --eval-every"]


def _profile_warnings(config: RunConfig) -> list[str]:
    """Whether all steps of a short run are looked at by the profiler, and none is timed."""
    if not (config.profile and config.steps and config.steps <= config.untimed_steps):
        return []
    return [f"--profile {config.profile} leaves none of {config.steps} steps to be timed; add --steps"]


def _checkpoint_warnings(config: RunConfig) -> list[str]:
    """Whether a run that asks for checkpoints ends before the first of them."""
    length, unit = (config.steps, "steps") if config.steps else (config.epochs, "epochs")
    if not config.checkpoint_every or length is None or config.checkpoint_every < length:
        return []
    return [
        f"--checkpoint-every {config.checkpoint_every} makes no checkpoint in a run of {length} {unit}; lower it if "
        "the run is to be able to go on after a stop"
    ]


def resolve_each(asked: Sequence[RunConfig]) -> list[RunConfig | UsageError]:
    """What `resolve` returns for each of them, or the reason why it is refused."""
    return [_resolved_or_refused(config) for config in asked]


def _resolved_or_refused(asked: RunConfig) -> RunConfig | UsageError:
    try:
        return resolve(asked)
    except UsageError as refusal:
        return refusal


def place_run(asked: RunConfig) -> RunConfig:
    """The configuration with its ranks on hosts, as far as numbers alone say that it can be; without torch.

    Raises:
        UsageError: options that contradict each other, or a cluster that cannot be.
    """
    if asked.epochs and asked.steps:
        raise UsageError("--epochs and --steps both set the length of the run; give one of them")
    if asked.max_restarts and not asked.checkpoint_every:
        raise UsageError(
            f"--max-restarts {asked.max_restarts} has nothing to go on from without checkpoints; add --checkpoint-every"
        )
    if asked.track != "none" and importlib.util.find_spec(asked.track) is None:
        raise UsageError(
            f"--track {asked.track} needs a package that is not installed; try: pip install 'gradwire[{asked.track}]'"
        )
    config = place(asked)
    check_machines(config)
    return config


def check(asked: RunConfig) -> RunConfig:
    """Refuse everything that shows without a network: components, their options, pairs, numbers of ranks and samples.

    Returns:
        the configuration, in which only what depends on the network and on this machine's devices is left open

    Raises:
        UsageError: something is unknown, illegal together, or impossible with this data.
    """
    config = place_run(asked)
    from bench.launch.components import build_components, check_together

    parts = build_components(config)
    config = place_run(parts.strategy.complete(asked))
    if config.straggler:
        Straggler.parse(config.straggler).check_among(config.world_size)
    config = config.choose(replicas=config.world_size)
    if config.devices is not None:
        Catalog.read(folders(None)).check(Topology.from_dict(config.devices), SHM)
    train_size, test_size = parts.dataset.resolve_sizes(config.train_size, config.test_size)
    if config.holdout_size >= train_size:
        raise UsageError(
            f"--holdout-size {config.holdout_size} leaves nothing of {train_size} training samples; lower it"
        )
    evaluated = config.holdout_size or test_size
    _check_shards(config, train_size - config.holdout_size, evaluated)
    chosen = vars(parts)
    short: dict[str, Any] = {name: spec.short_text(component) for name, component in chosen.items()}
    config = dataclasses.replace(
        config,
        **short,
        filled={name: spec.full_text(component) for name, component in chosen.items()},
        train_size=train_size,
        test_size=test_size,
        data_dir=str(Path(config.data_dir).absolute()),
    ).choose(
        name=_name(short),
        epochs=None if config.steps else DEFAULT_EPOCHS,
        eval_every=0 if config.steps else 1,
        lr=parts.optimizer.default_lr,
        lr_scaling=parts.compressor.default_lr_scaling,
    )
    check_together(config, parts)
    return config


def resolve(asked: RunConfig) -> RunConfig:
    """The run's configuration with every default filled in.

    Raises:
        UsageError: something is unknown, illegal together, or impossible here or with this data.
    """
    config = check(asked)
    from bench.launch.components import build_components, check_network, check_together, gradient_mb
    from bench.launch.devices import choose_device

    parts = build_components(config)
    config = dataclasses.replace(config, device=choose_device(config.device, _gpus_needed(config, parts)))
    check_together(config, parts)  # once more, for some work on the CPU only
    config = config.choose(
        bucket_mb=parts.strategy.default_bucket_mb(gradient_mb(parts), parts.optimizer, parts.compressor)
    )
    check_network(config, parts)
    return config


def _gpus_needed(config: RunConfig, parts: Components) -> int:
    """On this machine: ranks that share one talk through gloo, which sums for DDP there and sends no message."""
    from bench.strategies.ddp.ddp import is_plain

    by_ddp = parts.compressor.engine_hook or is_plain(parts.compressor, parts.collective, config.trigger)
    return 1 if by_ddp and not parts.optimizer.exchanges else config.world_size // config.nnodes


def with_ranks(config: RunConfig, world_size: int) -> RunConfig:
    """The configuration of a run that goes on with another number of ranks.

    Raises:
        UsageError: it cannot.
    """
    from bench.launch.components import build_components, check_network, check_together
    from bench.launch.devices import choose_device
    from collectives.server import Server

    parts = build_components(config)
    sharded = isinstance(parts.collective, Server) and parts.collective.placement == "sharded"
    obstacles = (
        (config.cluster is not None or config.nnodes > 1, "the run's hosts are part of its configuration"),
        (parts.strategy.component_name != "ddp", f"{parts.strategy.component_name} gives every rank a task of its own"),
        (parts.compressor.engine_hook, f"{parts.compressor.component_name} keeps its state in PyTorch's own hook"),
        (parts.compressor.chooses, f"{parts.compressor.component_name} keeps what waits by pair and layer"),
        (parts.optimizer.keeps_gradients, f"{parts.optimizer.component_name} keeps moments of its own on every rank"),
        (sharded, f"{config.collective} keeps a part of every layer on each rank"),
    )
    if reason := next((reason for applies, reason in obstacles if applies), None):
        raise UsageError(f"{reason}, which ranks that are new or gone have no part in; leave out --world-size")
    changed = dataclasses.replace(config, world_size=world_size, replicas=world_size, ranks_per_host=world_size)
    if changed.straggler:
        Straggler.parse(changed.straggler).check_among(world_size)
    _check_shards(changed, changed.train_size - changed.holdout_size, changed.holdout_size or changed.test_size)
    choose_device(changed.device, _gpus_needed(changed, parts))
    check_together(changed, parts)
    check_network(changed, parts)
    return changed


def _check_shards(config: RunConfig, train_size: int, test_size: int) -> None:
    replicas = config.replicas
    smallest = train_size // replicas
    for part, size in (("training", train_size), ("test", test_size)):
        if size < replicas:
            raise UsageError(f"{size} {part} samples cannot be divided over {replicas} ranks; lower --world-size")
    if smallest < config.samples_per_step:
        times = f" times --accumulate {config.accumulate}" if config.accumulate > 1 else ""
        raise UsageError(
            f"--batch-size {config.batch_size}{times} is larger than a rank's shard of {smallest} samples "
            f"({train_size} over {replicas} ranks); lower --batch-size or --world-size"
        )


def _name(short: dict[str, str]) -> str:
    kinds = ["model", "dataset", "compressor", "collective"]
    if short["strategy"] != RunConfig.strategy:
        kinds.append("strategy")
    return "-".join(short[kind].partition(":")[0] for kind in kinds)
