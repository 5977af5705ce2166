"""Check the options of `bench run` and fill in the defaults, which gives complete configurations.

Every impossible request is refused here, before any rank starts. Checks that need only numbers come first, before torch
is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core import spec
from bench.core.config.run import DEFAULT_EPOCHS, RunConfig
from bench.core.config.syntax import LrScaling, Straggler
from bench.core.errors import UsageError
from bench.core.topology import Topology
from bench.launch.jobs.placement import check_machines, place
from bench.strategies.placed.catalog import SHM, check_kinds, folders, read_tables

if TYPE_CHECKING:
    from bench.launch.components import Components


def prepare(options: RunConfig, seeds: Sequence[int]) -> tuple[list[RunConfig], list[str]]:
    """Do everything that needs torch before ranks can start; download the data set if it is missing.

    Returns:
        a complete configuration per seed, and notes for the user about this configuration, one sentence each

    Raises:
        UsageError: an option is unknown, impossible on this machine or with this data, or contradicts another one.
    """
    config = resolve(options)
    return [dataclasses.replace(config, seed=seed) for seed in seeds], make_ready(config)


def make_ready(config: RunConfig) -> list[str]:
    """Download the data set of a complete configuration if it is missing.

    Returns:
        notes for the user about this configuration, one sentence each

    Raises:
        UsageError: the strategy cannot train the model.
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
    """Return a note if the learning rate is scaled by the compressor's default, which the user may not expect."""
    chosen = parts.compressor.default_lr_scaling
    if chosen == "none" or config.lr_scaling != chosen or config.replicas == 1:
        return []
    scaled = config.lr * LrScaling.parse(chosen).factor(config.replicas)
    return [
        f"{config.compressor} scales the learning rate linearly, as its source does: {config.lr:g} x "
        f"{config.replicas} ranks = {scaled:g}; if {config.lr:g} was tuned on N ranks, add --lr-scaling "
        "linear:base=N; to leave it unscaled, --lr-scaling none"
    ]


def _target_warnings(config: RunConfig) -> list[str]:
    if config.target_accuracy is None or config.eval_every:
        return []
    return [
        "--target-accuracy with a single evaluation at the end does not measure the time to the target; add "
        "--eval-every"
    ]


def _profile_warnings(config: RunConfig) -> list[str]:
    if not (config.profile and config.steps and config.steps <= config.untimed_steps):
        return []
    return [f"--profile {config.profile} leaves none of {config.steps} steps to be timed; give more --steps"]


def _checkpoint_warnings(config: RunConfig) -> list[str]:
    length, unit = (config.steps, "steps") if config.steps else (config.epochs, "epochs")
    if not config.checkpoint_every or length is None or config.checkpoint_every < length:
        return []
    return [
        f"--checkpoint-every {config.checkpoint_every} makes no checkpoint in a run of {length} {unit}; lower it to "
        "be able to resume the run"
    ]


def resolve_each(options: Sequence[RunConfig]) -> list[RunConfig | UsageError]:
    """Return for each run its complete configuration, or the error with which `resolve` refuses it."""
    return [_resolved_or_refused(config) for config in options]


def _resolved_or_refused(options: RunConfig) -> RunConfig | UsageError:
    try:
        return resolve(options)
    except UsageError as refusal:
        return refusal


def place_run(options: RunConfig) -> RunConfig:
    """Check the options as far as numbers allow, without torch, and return them with ranks placed on hosts.

    Raises:
        UsageError: options contradict each other, or the cluster is impossible.
    """
    if options.epochs and options.steps:
        raise UsageError("--epochs and --steps both set the length of the run; give one of them")
    if options.max_restarts and not options.checkpoint_every:
        raise UsageError(
            f"--max-restarts {options.max_restarts} needs checkpoints to restart from; add --checkpoint-every"
        )
    if options.track != "none" and importlib.util.find_spec(options.track) is None:
        raise UsageError(
            f"--track {options.track} needs a package that is not installed; try: pip install "
            f"'gradwire[{options.track}]'"
        )
    config = place(options)
    check_machines(config)
    return config


def check(options: RunConfig) -> RunConfig:
    """Check all that needs no neural network: components, their options, pairs, numbers of ranks and samples.

    Returns:
        the configuration, complete but for what depends on the neural network and on this machine's devices

    Raises:
        UsageError: an option is unknown, impossible with this data, or contradicts another one.
    """
    config = place_run(options)
    from bench.launch.components import build_components, check_together

    parts = build_components(config)
    config = place_run(parts.strategy.complete(options))
    if config.straggler:
        Straggler.parse(config.straggler).check_among(config.world_size)
    config = config.choose(replicas=config.world_size)
    if config.devices is not None:
        check_kinds(Topology.from_dict(config.devices), *read_tables(folders()), SHM)
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


def resolve(options: RunConfig) -> RunConfig:
    """Return the run's configuration with all defaults filled in.

    Raises:
        UsageError: an option is unknown, impossible on this machine or with this data, or contradicts another one.
    """
    config = check(options)
    from bench.launch.components import build_components, check_network, check_together, gradient_mb
    from bench.launch.devices import choose_device

    parts = build_components(config)
    config = dataclasses.replace(config, device=choose_device(config.device, _gpus_needed(config, parts)))
    check_together(config, parts)  # again, because some components work only on the CPU
    config = config.choose(
        bucket_mb=parts.strategy.default_bucket_mb(gradient_mb(parts), parts.optimizer, parts.compressor)
    )
    check_network(config, parts)
    return config


def _gpus_needed(config: RunConfig, parts: Components) -> int:
    """Return the GPUs that the run needs on this machine.

    Ranks that share a GPU communicate through gloo, which can sum on GPUs for plain DDP but cannot send messages there.
    """
    from bench.strategies.ddp.ddp import is_plain
    from compressors.base import TorchHook

    by_ddp = isinstance(parts.compressor, TorchHook) or is_plain(parts.compressor, parts.collective, config.trigger)
    return 1 if by_ddp and not parts.optimizer.exchanges else config.world_size // config.nnodes


def with_ranks(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration of a run that resumes with another number of ranks.

    Raises:
        UsageError: the run cannot change its number of ranks.
    """
    from bench.launch.components import build_components, check_network, check_together
    from bench.launch.devices import choose_device
    from collectives.server import Server
    from compressors.base import OwnHook, TorchHook

    parts = build_components(config)
    compressor = parts.compressor
    sharded = isinstance(parts.collective, Server) and parts.collective.placement == "sharded"
    obstacles = (
        (config.cluster is not None or config.nnodes > 1, "the run's hosts are part of its configuration"),
        (parts.strategy.component_name != "ddp", f"{parts.strategy.component_name} gives every rank a different task"),
        (isinstance(compressor, TorchHook), f"{compressor.component_name} keeps its state in PyTorch's own hook"),
        (isinstance(compressor, OwnHook), f"{compressor.component_name} keeps residuals by pair and layer"),
        (parts.optimizer.keeps_gradients, f"{parts.optimizer.component_name} keeps different moments on every rank"),
        (sharded, f"{config.collective} keeps a part of every layer on each rank"),
    )
    if reason := next((reason for applies, reason in obstacles if applies), None):
        raise UsageError(f"{reason}, so the run cannot change its number of ranks; leave out --world-size")
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
