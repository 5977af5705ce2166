"""Resolve the options of `bench run`, once: check them, place the ranks, and fill in all defaults.

`check` does what needs neither torch nor the neural network, so that impossible options are refused at once; `resolve`
does the rest. The resulting configuration is complete: it becomes the run's `config.json`, from which the ranks read
all options.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bench.core import spec
from bench.core.config.run import DEFAULT_EPOCHS, DEFAULT_WORLD_SIZE, RanksConfig, RunConfig
from bench.core.config.syntax import LrScaling, Partition, Straggler
from bench.core.environment import usable_cores
from bench.core.errors import UsageError
from bench.hosts.cluster_options import cluster_from_options
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.recipes import recipe, with_batch_size
from bench.launch.refusals import outcomes_without_torch, result_or_refusal
from collectives.options import Incompatible

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.models.base import Model
    from bench.optimizers.base import Optimizer
    from bench.strategies.base import Strategy
    from collectives.base import Collective
    from compressors.base import Compressor

C = TypeVar("C", bound=RanksConfig)


def resolve_each(options: Sequence[RunConfig], server: ForkServer) -> list[RunConfig | UsageError]:
    """Return for each run its complete configuration, or the error with which its options are refused.

    If `check` refuses any run, the other runs are not resolved, and their configurations stay incomplete.

    Args:
        options: each run's options as the user gave them.
        server: resolves the runs in its process, which is started here and imports torch while the options are checked.
    """
    if options:
        server.warm_up_for(options[0])
    checked = outcomes_without_torch([functools.partial(check, each) for each in options])
    outcomes = [outcome or each for outcome, each in zip(checked, options, strict=True)]
    runs = [outcome for outcome in outcomes if isinstance(outcome, RunConfig)]
    if runs and len(runs) == len(outcomes):
        server.warm_up_for(runs[0])
        return [result_or_refusal(server.call, resolve, each) for each in runs]
    return outcomes


def check(options: RunConfig) -> RunConfig:
    """Check everything that needs no neural network, such as components, their options, and numbers of ranks.

    Returns:
        the configuration, complete except for what depends on the neural network and on this machine's devices

    Raises:
        UsageError: an option is unknown, impossible with this data set, or contradicts another option.
    """
    _check_alone(options)
    parts = build_components(options)
    config = place(parts.strategy.complete(options))
    config = with_batch_size(config.choose(replicas=config.world_size))
    train_size, test_size = parts.dataset.resolve_sizes(config.train_size, config.test_size)
    config = dataclasses.replace(config, train_size=train_size, test_size=test_size, clip_norm=config.clip_norm or None)
    _check_ranks(config)
    short: dict[str, Any] = {name: str(component) for name, component in vars(parts).items()}
    in_name = ["model", "dataset", "compressor", "collective"]
    in_name += ["strategy"] if short["strategy"] != RunConfig.strategy else []
    config = dataclasses.replace(
        config,
        **short,
        filled={name: spec.full_text(component) for name, component in vars(parts).items()},
        data_dir=str(Path(config.data_dir).absolute()),
    ).choose(
        name="-".join(spec.parse(short[kind]).label for kind in in_name),
        epochs=None if config.steps else DEFAULT_EPOCHS,
        eval_every=0 if config.steps else 1,
        lr=parts.optimizer.default_lr,
        lr_scaling=parts.compressor.traits.default_lr_scaling,
    )
    _check_together(config, parts)
    _check_task(config, parts.dataset)
    if LrScaling.parse(config.lr_scaling).gradual and not config.warmup_epochs:
        raise UsageError(f"--lr-scaling {config.lr_scaling} rises during warm-up; add --warmup-epochs, such as 5")
    if config.steps and not isinstance(config.eval_every, int):
        raise UsageError(f"--eval-every {config.eval_every} is no number of steps; with --steps, give a whole number")
    return config


def _check_task(config: RunConfig, dataset: Dataset) -> None:
    if config.partition != "iid" and not dataset.has_classes:
        raise UsageError(
            f"--partition {config.partition} divides samples by class, and {dataset.component_name} has no classes; "
            "use --partition iid"
        )
    if config.target_bits_per_byte is not None and dataset.task.metric != "test_bits_per_byte":
        raise UsageError(
            f"{dataset.component_name} is not a text and has no bits per byte; use --target-accuracy instead of "
            "--target-bits-per-byte"
        )
    if config.target_accuracy is not None and config.target_bits_per_byte is not None:
        raise UsageError("--target-accuracy and --target-bits-per-byte are two targets; leave out one")
    if config.stop_at_target and not config.has_target:
        raise UsageError("--stop-at-target needs a target; add --target-accuracy, such as 0.95")


def resolve(options: RunConfig) -> RunConfig:
    """Return a run's complete configuration.

    Args:
        options: the options as the user gave them, or the configuration that `check` returned for them.

    Raises:
        UsageError: an option is unknown, impossible on this machine or with this data set, or contradicts another one.
    """
    config = options if options.filled else check(options)
    parts = build_components(config)
    config = dataclasses.replace(config, device=choose_device(config.device, _gpus_needed(config, parts)))
    _check_together(config, parts)  # again, because some components work only on the CPU
    import torch

    from bench.models.base import build_network
    from bench.strategies.ddp import gradient_mb
    from compressors.layer import layers_of, sparse_gradients

    num_classes = parts.dataset.num_classes
    Partition.parse(config.partition).check_classes(num_classes, config.replicas)
    with torch.device("meta"), spec.usage_errors():  # shapes and dtypes, but no memory
        network = build_network(parts.model, parts.dataset)
    if reason := sparse_gradients(network):
        raise UsageError(reason)
    layers = layers_of(network)
    config = config.choose(bucket_mb=parts.strategy.default_bucket_mb(layers, parts.optimizer, parts.compressor))
    _check_bucket(config, parts.compressor, gradient_mb(layers))
    _check_network(config, parts)
    of_strategy = parts.strategy.examine(config, network)
    with spec.usage_errors():
        parts.compressor.check_compatible(parts.collective, layers)
        parts.optimizer.check_layers(layers)
    return dataclasses.replace(config, notes=tuple(_notes(config, parts, of_strategy)))


def _check_bucket(config: RunConfig, compressor: Compressor, model_mb: float) -> None:
    if compressor.traits.one_bucket and config.bucket_mb is not None and config.bucket_mb < model_mb:
        raise UsageError(
            f"{config.compressor} needs the whole model in one bucket, and --bucket-mb {config.bucket_mb:g} is too "
            f"small for it; leave out --bucket-mb, or give --bucket-mb {model_mb:g} or more"
        )


def _notes(config: RunConfig, parts: Components, of_strategy: Sequence[str]) -> Iterator[str]:
    """Yield what the user should know about a complete configuration, one sentence each."""
    if config.recipe:
        yield recipe(config.recipe).note(config)
    yield from parts.dataset.warnings()
    yield from parts.compressor.warnings()
    yield from parts.optimizer.warnings()
    yield from _scaling_notes(config, parts)
    yield from of_strategy
    if Partition.parse(config.partition).per_rank is not None:
        yield "all ranks get as many samples as the rank with the fewest; column unused_samples has the rest"
    yield from _length_notes(config)


def _check_network(config: RunConfig, parts: Components) -> None:
    """Check that the network can process the data set's samples, by a forward pass over two samples of zeros.

    Built-in models are made for 3x32x32 images and are not checked with these.
    """
    from bench.datasets.base import IMAGE_SIZE
    from bench.models.base import build_network, try_forward

    inputs, num_classes = parts.dataset.dummy_batch(2, "cpu"), parts.dataset.num_classes
    with spec.usage_errors():
        parts.model.check_inputs(inputs)
    are_images = inputs.dim() == 4 and inputs.shape[1] == 3
    name = spec.parse(config.model)
    if not name.is_function and are_images and inputs.shape[2:] == (IMAGE_SIZE, IMAGE_SIZE):
        return
    try:
        outputs = try_forward(build_network(parts.model, parts.dataset), name.name, inputs)
    except Incompatible as reason:
        advice = "change the model or the data"
        if are_images:
            advice = "use --model resnet50:stem=imagenet, or leave size out of --dataset"
        elif parts.dataset.task.metric == "test_bits_per_byte":
            advice = "use a model that predicts bytes, such as --model gpt"
        raise UsageError(f"{reason}; {advice}") from None
    if problem := parts.dataset.task.output_error(outputs, len(inputs), num_classes):
        raise UsageError(f"{name.name} {problem}")


def prepare_data(dataset: str, data_dir: str) -> None:
    """Download a data set if it is not in the folder of data sets.

    Args:
        dataset: spec of the data set.
        data_dir: folder of the data sets.
    """
    component: Dataset = spec.build("datasets", dataset)
    if not component.is_present(Path(data_dir)):
        component.prepare(Path(data_dir))


def with_ranks(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration of a run that resumes with another number of ranks.

    Raises:
        UsageError: the run cannot change its number of ranks; the message says why.
    """
    from compressors.base import DdpHook

    parts = build_components(config)
    compressor = parts.compressor
    obstacles = (
        (config.cluster is not None or config.nnodes > 1, "the run's hosts are part of its configuration"),
        (config.partition != "iid", f"--partition {config.partition} ties samples to ranks"),
        (
            parts.strategy.component_name not in ("ddp", "local"),
            f"{parts.strategy.component_name} gives every rank a different task",
        ),
        ("steps=auto" in config.strategy, f"{config.strategy} gives every rank another number of steps"),
        (isinstance(compressor, DdpHook), f"{compressor.component_name} keeps its state in a hook of DDP"),
        (parts.optimizer.keeps_gradients, f"{parts.optimizer.component_name} keeps different moments on every rank"),
        ("placement=sharded" in config.collective, f"{config.collective} keeps a part of every layer on each rank"),
    )
    if reason := next((reason for applies, reason in obstacles if applies), None):
        raise UsageError(f"{reason}, so the run cannot change its number of ranks; leave out --world-size")
    changed = dataclasses.replace(config, world_size=world_size, replicas=world_size, ranks_per_host=world_size)
    _check_ranks(changed)
    return resolve(changed)


# Components.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Components:
    """The six components of a run, in fields named as the options; whether they work together is not checked yet."""

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    compressor: Compressor
    collective: Collective
    strategy: Strategy


def build_components(config: RunConfig) -> Components:
    """Build the six components of a run; if no collective is given, the first default that suits the compressor.

    Raises:
        UsageError: a component or option is unknown, or a value is out of range.
    """
    from compressors.base import first_compatible

    strategy: Strategy = spec.build("strategies", config.strategy)
    compressor: Compressor = spec.build("compressors", config.compressor)
    optimizer: Optimizer = spec.build("optimizers", config.optimizer)
    defaults = strategy.default_collectives or (
        *optimizer.default_collectives,
        *compressor.traits.default_collectives,
    )
    names = [config.collective] if config.collective else defaults
    collectives: list[Collective] = [spec.build("collectives", name) for name in names]
    return Components(
        model=spec.build("models", config.model),
        dataset=spec.build("datasets", config.dataset),
        optimizer=optimizer,
        compressor=compressor,
        collective=first_compatible(compressor, collectives),  # if none works, `_check_together` says why
        strategy=strategy,
    )


def _check_together(config: RunConfig, parts: Components) -> None:
    with spec.usage_errors():
        parts.strategy.check_compatible(config, parts.compressor, parts.collective, parts.optimizer)
        parts.compressor.check_compatible(parts.collective)
        parts.optimizer.check_compatible(parts.compressor, parts.collective)
        parts.collective.check_ranks(config.replicas)
        if parts.compressor.traits.owns_momentum:
            parts.optimizer.hand_over_momentum()
    if config.clip_norm is not None:
        _check_clipping(config, parts)


def _check_clipping(config: RunConfig, parts: Components) -> None:
    method, stepping = parts.compressor.component_name, parts.optimizer.component_name
    if parts.compressor.traits.owns_momentum:
        raise UsageError(
            f"{method} applies momentum before it sends, so no rank has the mean gradient that --clip-norm limits; add "
            f"momentum_correction=false to {method}, or use --clip-norm 0 or dgc:clip_norm={config.clip_norm:g}, which "
            "clips before it"
        )
    if parts.optimizer.keeps_gradients and not parts.optimizer.encodes_itself:
        raise UsageError(
            f"{stepping} exchanges moments, so no rank has the mean gradient that --clip-norm limits; use "
            "--clip-norm 0, or another optimizer"
        )


# Ranks and devices.


def place(options: C) -> C:
    """Return the configuration with the numbers of hosts, ranks and threads and the virtual hosts' links filled in.

    Raises:
        UsageError: options contradict each other, or the virtual hosts are impossible.
    """
    cluster = cluster_from_options(options)
    if cluster is None:
        config = options.choose(world_size=DEFAULT_WORLD_SIZE)
        if config.world_size % config.nnodes:
            raise UsageError(
                f"--world-size {config.world_size} cannot be divided over {config.nnodes} machines; make it a multiple "
                "of --nnodes"
            )
        per_host = config.world_size // config.nnodes
        return config.choose(hosts=config.nnodes, ranks_per_host=per_host, threads=max(1, usable_cores() // per_host))
    if options.world_size not in (None, cluster.world_size):
        raise UsageError(
            f"--world-size {options.world_size} contradicts {len(cluster.hosts)} virtual hosts with "
            f"{cluster.ranks_per_host} rank(s) each; leave out --world-size"
        )
    if options.device == "cuda":
        raise UsageError("virtual hosts share this machine and communicate through gloo; use --device cpu")
    if options.nnodes > 1:
        raise UsageError("virtual hosts are on one machine; leave out either --nnodes or the options of virtual hosts")
    return dataclasses.replace(
        options,
        device="cpu",
        world_size=cluster.world_size,
        hosts=len(cluster.hosts),
        ranks_per_host=cluster.ranks_per_host,
        cluster=cluster.to_dict(),
        **cluster.columns(),
    ).choose(threads=max(1, usable_cores() // cluster.world_size))


def choose_device(device: Literal["auto", "cpu", "cuda"], num_needed: int = 1) -> Literal["cpu", "cuda"]:
    """Return "cuda" if --device allows it and torch sees enough CUDA devices, else "cpu".

    Args:
        device: value of --device.
        num_needed: number of CUDA devices that the job needs on this machine.

    Raises:
        UsageError: --device is "cuda" and torch sees too few devices.
    """
    import torch

    num_seen = torch.cuda.device_count()
    if device == "cuda" and num_seen < num_needed:
        raise UsageError(
            f"--device cuda needs {num_needed} CUDA devices on this machine and torch sees {num_seen}; use --device "
            "cpu, or auto"
        )
    return "cuda" if device != "cpu" and num_seen >= num_needed else "cpu"


def _gpus_needed(config: RunConfig, parts: Components) -> int:
    from bench.strategies.ddp import is_plain
    from compressors.base import TorchHook

    # Ranks that share a GPU communicate through gloo, which can sum on GPUs for plain DDP but cannot send messages
    # there.
    by_ddp = isinstance(parts.compressor, TorchHook) or is_plain(parts.compressor, parts.collective, config.trigger)
    return 1 if by_ddp and not parts.optimizer.exchanges else config.world_size // config.nnodes


def _check_ranks(config: RunConfig) -> None:
    if config.straggler:
        Straggler.parse(config.straggler).check_among(config.world_size)
    if config.holdout_size >= config.train_size:
        raise UsageError(
            f"--holdout-size {config.holdout_size} leaves none of {config.train_size} training samples to train on; "
            "lower --holdout-size"
        )
    replicas, train_size = config.replicas, config.train_size - config.holdout_size
    for part, size in (("training", train_size), ("test", config.holdout_size or config.test_size)):
        if size < replicas:
            raise UsageError(f"{size} {part} samples cannot be divided over {replicas} ranks; lower --world-size")
    smallest = train_size // replicas
    if smallest < config.samples_per_step:
        times = f" times --accumulate {config.accumulate}" if config.accumulate > 1 else ""
        raise UsageError(
            f"--batch-size {config.batch_size}{times} is larger than a rank's shard of {smallest} samples "
            f"({train_size} over {replicas} ranks); lower --batch-size or --world-size"
        )


# Options about the length of the run and what it writes.


def _check_alone(options: RunConfig) -> None:
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
    if options.nnodes > 1 and not options.rdzv_endpoint:
        raise UsageError(
            "several machines need an address to meet at; give --rdzv-endpoint HOST:PORT of machine 0 on each machine"
        )
    if options.node_rank >= options.nnodes:
        raise UsageError(
            f"--node-rank {options.node_rank} does not exist among {options.nnodes} machines; machines count from 0"
        )


def _scaling_notes(config: RunConfig, parts: Components) -> list[str]:
    chosen = parts.compressor.traits.default_lr_scaling
    if chosen == "none" or config.lr_scaling != chosen or config.replicas == 1:
        return []  # a note is for users who do not expect the compressor's default
    scaled = config.lr * LrScaling.parse(chosen).factor(config.replicas)
    return [
        f"{config.compressor} scales the learning rate linearly, as its source does: {config.lr:g} x "
        f"{config.replicas} ranks = {scaled:g}; if {config.lr:g} was tuned on N ranks, add --lr-scaling "
        "linear:base=N; to leave it unscaled, --lr-scaling none"
    ]


def _length_notes(config: RunConfig) -> list[str]:
    length, unit = (config.steps, "steps") if config.steps else (config.epochs, "epochs")
    notes = []
    if config.checkpoint_every and length is not None and config.checkpoint_every >= length:
        notes.append(
            f"--checkpoint-every {config.checkpoint_every} makes no checkpoint in a run of {length} {unit}; lower it "
            "to be able to resume the run"
        )
    if config.has_target and not config.eval_every:
        notes.append("a single evaluation at the end does not measure the time to the target; add --eval-every")
    if config.profile and config.steps and config.steps <= config.untimed_steps:
        notes.append(f"--profile {config.profile} leaves none of {config.steps} steps to be timed; give more --steps")
    if config.steps and "warmup_epochs=" in config.filled["compressor"]:
        notes.append("with --steps, the compressor has no warm-up: it compresses fully wherever it is used")
    return notes
