"""Plan a run once, before it starts: check its options, place its ranks, and fill in all defaults.

`check` does the part that needs neither torch nor the neural network, so that impossible options are refused at once;
`plan` does the rest. The resulting configuration is complete: it becomes the run's `config.json`, from which the ranks
read all options.

Tables in `bench.launch.refusals` and in the strategies list the choices that exclude each other. This module checks a
run's options against these tables.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from bench.core import spec
from bench.core.config.run import DEFAULT_EPOCHS, DEFAULT_WORLD_SIZE, RanksConfig, RunConfig
from bench.core.config.syntax import LrScaling, Partition
from bench.core.environment import usable_cores
from bench.core.errors import UsageError
from bench.hosts.cluster_options import cluster_from_options
from bench.launch import refusals
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.recipes import recipe, with_batch_size
from bench.launch.refusals import Components
from bench.launch.without_torch import outcomes_without_torch, result_or_refusal
from collectives.options import Incompatible
from collectives.refusals import refuse

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.optimizers.base import Optimizer
    from bench.strategies.base import Strategy
    from collectives.base import Collective
    from compressors.base import Compressor

C = TypeVar("C", bound=RanksConfig)


def plan_each(options: Sequence[RunConfig], server: ForkServer) -> list[RunConfig | UsageError]:
    """Return for each run its complete configuration, or the error with which its options are refused.

    If `check` refuses any run, the other runs are not planned, and their configurations stay incomplete.

    Args:
        options: each run's options as the user gave them.
        server: plans the runs in its process; this function starts the process, which imports torch while the options
            are checked.
    """
    if options:
        server.warm_up_for(options[0])
    checked = outcomes_without_torch([functools.partial(check, each) for each in options])
    outcomes = [outcome or each for outcome, each in zip(checked, options, strict=True)]
    runs = [outcome for outcome in outcomes if isinstance(outcome, RunConfig)]
    if runs and len(runs) == len(outcomes):
        server.warm_up_for(runs[0])
        return [result_or_refusal(server.call, plan, each) for each in runs]
    return outcomes


def check(options: RunConfig) -> RunConfig:
    """Check everything that needs no neural network, such as components, their options, and numbers of ranks.

    Returns:
        the configuration, complete except for values that depend on the neural network or on this machine's devices

    Raises:
        UsageError: an option is unknown, impossible with this data set, or contradicts another option.
    """
    with spec.usage_errors():
        refuse(refusals.option_refusals, options)
        parts = build_components(options)
        config = place(parts.strategy.complete(options))
        config = with_batch_size(config.choose(replicas=config.world_size))
        train_size, test_size = parts.dataset.resolve_sizes(config.train_size, config.test_size)
        config = config.changed(train_size=train_size, test_size=test_size, clip_norm=config.clip_norm or None)
        refuse(refusals.sample_refusals, config)
        short: dict[str, Any] = {name: str(component) for name, component in vars(parts).items()}
        in_name = ["model", "dataset", "compressor", "collective"]
        in_name += ["strategy"] if short["strategy"] != RunConfig.strategy else []
        config = config.changed(
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
        refuse(refusals.training_refusals, config, parts)
    return config


def plan(options: RunConfig) -> RunConfig:
    """Return a run's complete configuration.

    Args:
        options: the options as the user gave them, or the configuration that `check` returned for them.

    Raises:
        UsageError: an option is unknown, impossible on this machine or with this data set, or contradicts another one.
    """
    import torch

    from bench.models.base import build_network
    from compressors.layer import layers_of, sparse_gradients
    from gradwire.ddp.buckets import gradient_mb

    config = options if options.filled else check(options)
    parts = build_components(config)
    config = config.changed(device=choose_device(config.device, _gpus_needed(config, parts)))
    with spec.usage_errors():
        _check_together(config, parts)  # again, because some components work only on the CPU
        refuse(refusals.class_refusals, config, parts.dataset.num_classes)
        with torch.device("meta"):  # shapes and dtypes, but no memory
            network = build_network(parts.model, parts.dataset)
        if reason := sparse_gradients(network):
            raise UsageError(reason)
        layers = layers_of(network)
        config = config.choose(bucket_mb=parts.strategy.default_bucket_mb(layers, parts.optimizer, parts.compressor))
        refuse(refusals.bucket_refusals, config, parts, gradient_mb(layers))
        _check_network(config, parts)
        of_strategy = parts.strategy.examine(config, network)
        parts.compressor.check_compatible(parts.collective, layers)
        parts.optimizer.check_layers(layers)
    return config.changed(notes=tuple(_notes(config, parts, of_strategy)))


def with_ranks(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration of a run that resumes with another number of ranks.

    Raises:
        UsageError: the run cannot change its number of ranks; the message says why.
    """
    with spec.usage_errors():
        refuse(refusals.resizing_refusals, config, build_components(config))
        changed = config.changed(world_size=world_size, replicas=world_size, ranks_per_host=world_size)
        refuse(refusals.sample_refusals, changed)
    return plan(changed)


def _check_network(config: RunConfig, parts: Components) -> None:
    """Check that the network can process the data set's samples, by a forward pass over two samples of zeros.

    Built-in models are made for 3x32x32 images, so they are not checked with images of this shape.
    """
    import torch

    from bench.datasets.base import IMAGE_SIZE
    from bench.models.base import build_network, try_forward

    inputs, num_classes = parts.dataset.dummy_batch(2, "cpu"), parts.dataset.num_classes
    parts.model.check_inputs(inputs)
    are_images = inputs.dim() == 4 and inputs.shape[1] == 3
    name, dataset = spec.parse(config.model), spec.parse(config.dataset).name
    if not name.is_function and are_images and inputs.shape[2:] == (IMAGE_SIZE, IMAGE_SIZE):
        return
    try:
        outputs = try_forward(build_network(parts.model, parts.dataset), name.name, inputs)
    except Incompatible as reason:
        advice = f"change {name.name} or {dataset}"
        if not inputs.is_floating_point():
            advice = f"return inputs in float32, or pixels in uint8, from {dataset}, or change {name.name}"
        if are_images:
            advice = "use --model resnet50:stem=imagenet, or leave size out of --dataset"
        elif parts.dataset.task.metric == "test_bits_per_byte":
            advice = "use a model that predicts bytes, such as --model gpt"
        raise UsageError(f"{reason}; {advice}") from None
    if problem := parts.dataset.task.output_error(outputs, len(inputs), num_classes):
        classes = f"the {num_classes} classes of {dataset} (labels 0 to {num_classes - 1})"
        raise UsageError(f"{name.name} {problem}; return a value for each of {classes}")
    if isinstance(outputs, torch.Tensor) and not outputs.requires_grad:
        raise UsageError(f"{name.name} returns logits that have no gradient; leave out detach, no_grad and the like")


def prepare_data(dataset: str, data_dir: str) -> None:
    """Download a data set if it is not in the folder of data sets.

    Args:
        dataset: spec of the data set.
        data_dir: folder of the data sets.
    """
    component: Dataset = spec.build("datasets", dataset)
    if not component.is_present(Path(data_dir)):
        component.prepare(Path(data_dir))


def build_components(config: RunConfig) -> Components:
    """Build the six components of a run; if no collective is given, use the first default that suits the compressor.

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
        collective=first_compatible(compressor, collectives),  # if none works, `check` says why
        strategy=strategy,
    )


def _check_together(config: RunConfig, parts: Components) -> None:
    refuse(parts.strategy.refusals, config, parts.compressor, parts.collective, parts.optimizer)
    parts.compressor.check_compatible(parts.collective)
    refuse(parts.optimizer.refusals, parts.compressor, parts.collective)
    refuse(parts.collective.rank_refusals, config.replicas)
    if parts.compressor.traits.owns_momentum:
        parts.optimizer.hand_over_momentum()
    refuse(refusals.clipping_refusals, config, parts)


# Ranks and devices.


def place(options: C) -> C:
    """Fill in the numbers of hosts, ranks and threads, and the virtual hosts' links; return the new configuration.

    Raises:
        UsageError: options contradict each other, or the virtual hosts are impossible.
    """
    cluster = cluster_from_options(options)
    with spec.usage_errors():
        refuse(refusals.host_refusals, options, cluster)
    if cluster is None:
        config = options.choose(world_size=DEFAULT_WORLD_SIZE)
        per_host = config.world_size // config.nnodes
        return config.choose(hosts=config.nnodes, ranks_per_host=per_host, threads=max(1, usable_cores() // per_host))
    return options.changed(
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

    # Ranks that share a GPU communicate through gloo. On GPUs, gloo can sum for plain DDP, but it cannot send messages.
    by_ddp = isinstance(parts.compressor, TorchHook) or is_plain(parts.compressor, parts.collective, config.trigger)
    return 1 if by_ddp and not parts.optimizer.exchanges else config.world_size // config.nnodes


# Notes.


def _notes(config: RunConfig, parts: Components, of_strategy: Sequence[str]) -> Iterator[str]:
    """Yield what the user should know about a complete configuration, one sentence each."""
    if config.recipe:
        yield recipe(config.recipe).note(config)
    yield from (*parts.dataset.warnings(), *parts.compressor.warnings(), *parts.optimizer.warnings())
    scaling, steps = parts.compressor.traits.default_lr_scaling, config.steps
    scaled = config.lr * LrScaling.parse(scaling).factor(config.replicas)
    # The note on the learning rate is for users who do not expect the compressor's default.
    is_scaled = scaling != "none" and config.lr_scaling == scaling and config.replicas > 1
    length, unit = (steps, "steps") if steps else (config.epochs, "epochs")
    notes = (
        (
            is_scaled,
            f"{config.compressor} scales the learning rate linearly, as its source does: {config.lr:g} x "
            f"{config.replicas} ranks = {scaled:g}; if {config.lr:g} was tuned on N ranks, add --lr-scaling "
            "linear:base=N; to leave it unscaled, --lr-scaling none",
        ),
        *((True, note) for note in of_strategy),
        (
            Partition.parse(config.partition).per_rank is not None,
            "all ranks get as many samples as the rank with the fewest; column unused_samples counts the rest",
        ),
        (
            length is not None and 0 < length <= config.checkpoint_every,
            f"--checkpoint-every {config.checkpoint_every} makes no checkpoint in a run of {length} {unit}; lower it "
            "to be able to resume the run",
        ),
        (
            config.has_target and not config.eval_every,
            "a single evaluation at the end does not measure the time to the target; add --eval-every",
        ),
        (
            steps is not None and config.profile > 0 and steps <= config.untimed_steps,
            f"--profile {config.profile} leaves none of {steps} steps to be timed; give more --steps",
        ),
        (
            steps is not None and "warmup_epochs" in parts.compressor.option_names(),
            "with --steps, the compressor has no warm-up: it has its final ratio wherever it is used",
        ),
    )
    yield from (sentence for applies, sentence in notes if applies)
