"""Tables of options of `bench run` that exclude each other, for `collectives.refusals.refuse`.

`bench.launch.plan` checks a run's options against these tables. Each strategy has a further table of its own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import TYPE_CHECKING

from bench.core.config.run import DEFAULT_WORLD_SIZE, RanksConfig, RunConfig
from bench.core.config.syntax import LrScaling, Partition, Straggler
from bench.hosts.cluster import Cluster
from collectives.refusals import Refusal

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from bench.models.base import Model
    from bench.optimizers.base import Optimizer
    from bench.strategies.base import Strategy
    from collectives.base import Collective
    from compressors.base import Compressor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Components:
    """The six components of a run, in fields named like the options; they may turn out not to work together."""

    model: Model
    dataset: Dataset
    optimizer: Optimizer
    compressor: Compressor
    collective: Collective
    strategy: Strategy


def option_refusals(options: RunConfig) -> list[Refusal]:
    """Return the impossible combinations of options that can be found from the options alone."""
    is_tracker_missing = options.track != "none" and importlib.util.find_spec(options.track) is None
    return [
        Refusal(
            bool(options.epochs and options.steps),
            "--epochs and --steps both set the length of the run",
            [{"steps": None}, {"epochs": None}],
        ),
        Refusal(
            bool(options.max_restarts and not options.checkpoint_every),
            f"--max-restarts {options.max_restarts} needs checkpoints to restart from",
            [{"checkpoint_every": 1}, {"max_restarts": None}],
        ),
        Refusal(
            is_tracker_missing,
            f"--track {options.track} needs a package that is not installed (pip install 'gradwire[{options.track}]')",
            [{"track": None}],
        ),
        Refusal(
            options.nnodes > 1 and not options.rdzv_endpoint,
            "--nnodes asks for several machines, which need HOST:PORT of machine 0 to connect",
            [{"rdzv_endpoint": "host0:29500"}],
        ),
        Refusal(
            options.node_rank >= options.nnodes,
            f"--node-rank {options.node_rank} does not exist among {options.nnodes} machines, which count from 0",
            [{"node_rank": options.nnodes - 1}],
        ),
    ]


def host_refusals(options: RanksConfig, cluster: Cluster | None) -> list[Refusal]:
    """Return the impossible combinations of options and hosts; without a cluster, the hosts are machines."""
    world_size, nnodes = options.world_size or DEFAULT_WORLD_SIZE, options.nnodes
    described = f"{len(cluster.hosts)} virtual hosts with {cluster.ranks_per_host} rank(s) each" if cluster else ""
    return [
        Refusal(
            cluster is None and world_size % nnodes > 0,
            f"--world-size {world_size} cannot be divided over --nnodes {nnodes} machines",
            [{"world_size": nnodes * math.ceil(world_size / nnodes)}],
        ),
        Refusal(
            cluster is not None and options.world_size not in (None, cluster.world_size),
            f"--world-size {options.world_size} contradicts {described}",
            [{"world_size": None}],
        ),
        Refusal(
            cluster is not None and options.device == "cuda",
            "virtual hosts share this machine and communicate through gloo, which --device cuda excludes",
            [{"device": "cpu"}],
        ),
        Refusal(
            cluster is not None and nnodes > 1,
            f"virtual hosts are on one machine, and --nnodes says {nnodes}",
            [{"nnodes": None}],
        ),
    ]


def sample_refusals(config: RunConfig) -> list[Refusal]:
    """Return the impossible combinations of options and numbers of samples and ranks."""
    straggler = Straggler.parse(config.straggler) if config.straggler else None
    held_out, replicas, accumulate = config.holdout_size, config.replicas, config.accumulate
    train_size, test_size = config.train_size - held_out, held_out or config.test_size
    shard = train_size // replicas
    times = f" times --accumulate {accumulate}" if accumulate > 1 else ""
    batch_size = shard // accumulate
    return [
        *straggler_refusals(straggler, config.world_size),
        Refusal(
            train_size <= 0,
            f"--holdout-size {held_out} leaves none of {config.train_size} training samples to train on",
            [{"holdout_size": config.train_size // 2}],
        ),
        *(
            Refusal(
                size < replicas,
                f"{size} samples, of {flag}, cannot be divided over {replicas} ranks",
                [{"world_size": max(1, size)} | less],
            )
            for flag, size, less in (
                ("--train-size", train_size, {"batch_size": 1}),
                ("--holdout-size" if held_out else "--test-size", test_size, {}),
            )
        ),
        Refusal(
            shard < config.samples_per_step,
            f"--batch-size {config.batch_size}{times} is larger than a rank's shard of {shard} samples ({train_size} "
            f"over {replicas} ranks)",
            [{"batch_size": batch_size} if batch_size else {"batch_size": shard, "accumulate": None}],
        ),
    ]


def straggler_refusals(straggler: Straggler | None, world_size: int) -> list[Refusal]:
    """Return the refusal of a straggler whose rank does not exist, because there are too few ranks."""
    last = straggler and str(dataclasses.replace(straggler, rank=world_size - 1))
    return [
        Refusal(
            straggler is not None and straggler.rank >= world_size,
            f"--straggler {straggler} names none of the {world_size} ranks, which count from 0",
            [{"straggler": last}],
        )
    ]


def training_refusals(config: RunConfig, parts: Components) -> list[Refusal]:
    """Return the impossible combinations of options about the data set, the targets and the schedule."""
    dataset, of_accuracy = parts.dataset.component_name, {"target_bits_per_byte": None, "target_accuracy": 0.95}
    return [
        Refusal(
            config.partition != "iid" and not parts.dataset.has_classes,
            f"--partition {config.partition} divides samples by class, and {dataset} has no classes",
            [{"partition": "iid"}],
        ),
        Refusal(
            config.target_bits_per_byte is not None and parts.dataset.task.metric != "test_bits_per_byte",
            f"{dataset} is not a text, so it has no bits per byte for --target-bits-per-byte",
            [of_accuracy],
        ),
        Refusal(
            config.target_accuracy is not None and config.target_bits_per_byte is not None,
            "--target-accuracy and --target-bits-per-byte are two targets, and a run has only one",
            [{"target_accuracy": None}, {"target_bits_per_byte": None}],
        ),
        Refusal(
            config.stop_at_target and not config.has_target,
            "--stop-at-target needs a target",
            [{"target_accuracy": 0.95}, {"stop_at_target": None}],
        ),
        Refusal(
            LrScaling.parse(config.lr_scaling).gradual and not config.warmup_epochs,
            f"--lr-scaling {config.lr_scaling} raises the rate during warm-up, and there is no warm-up",
            [{"warmup_epochs": 5}],
        ),
        Refusal(
            bool(config.steps) and not isinstance(config.eval_every, int),
            f"with --steps, --eval-every counts steps, and {config.eval_every} is not a whole number",
            [{"eval_every": math.ceil(config.eval_every)}],
        ),
    ]


def class_refusals(config: RunConfig, num_classes: int) -> list[Refusal]:
    """Return the impossible combinations of --partition and a number of classes.

    Such a partition gives each rank more classes than the data set has, or too few to use all classes.
    """
    per_rank = Partition.parse(config.partition).per_rank or 0
    enough = math.ceil(num_classes / config.replicas)
    return [
        Refusal(
            per_rank > num_classes,
            f"--partition {config.partition} is not possible with {num_classes} classes",
            [{"partition": f"classes:per_rank={num_classes}"}, {"partition": "iid"}],
        ),
        Refusal(
            0 < config.replicas * per_rank < num_classes,
            f"--partition {config.partition} leaves out some of {num_classes} classes with {config.replicas} ranks",
            [
                {"partition": f"classes:per_rank={enough}"},
                {"world_size": math.ceil(num_classes / max(1, per_rank))},
            ],
        ),
    ]


def clipping_refusals(config: RunConfig, parts: Components) -> list[Refusal]:
    """Return the impossible combinations of --clip-norm and methods with which no rank has a mean gradient to clip."""
    method, is_clipped = parts.compressor.component_name, config.clip_norm is not None
    instead = f" ({method}:clip_norm clips before momentum)" if hasattr(parts.compressor, "clip_norm") else ""
    return [
        Refusal(
            is_clipped and parts.compressor.traits.owns_momentum,
            f"{method} applies momentum before it sends, so no rank has the mean gradient that --clip-norm limits"
            f"{instead}",
            [{"compressor.momentum_correction": False}, {"clip_norm": 0}],
        ),
        Refusal(
            is_clipped and parts.optimizer.keeps_gradients and not parts.optimizer.encodes_itself,
            f"{parts.optimizer.component_name} exchanges moments, so no rank has the mean gradient that --clip-norm "
            "limits",
            [{"clip_norm": 0}, {"optimizer": "sgd"}],
        ),
    ]


def bucket_refusals(config: RunConfig, parts: Components, model_mb: float) -> list[Refusal]:
    """Return the impossible combinations of --bucket-mb and compressors that need the whole model in one bucket.

    `model_mb` is the size of the model's gradients in MiB.
    """
    bucket_mb = config.bucket_mb
    return [
        Refusal(
            parts.compressor.traits.one_bucket and bucket_mb is not None and bucket_mb < model_mb,
            f"{config.compressor} needs the whole model in one bucket, and --bucket-mb {bucket_mb} is too small for it",
            [{"bucket_mb": None}, {"bucket_mb": model_mb}],
        )
    ]


def resizing_refusals(config: RunConfig, parts: Components) -> list[Refusal]:
    """Return the reasons, as refusals, why a run cannot resume with another number of ranks."""
    are_hosts_fixed = config.cluster is not None or config.nnodes > 1
    obstacles = (
        "the run's hosts are part of its configuration" if are_hosts_fixed else "",
        "" if config.partition == "iid" else f"--partition {config.partition} ties samples to ranks",
        *(component.obstacle_to_resizing() for component in vars(parts).values()),
    )
    return [
        Refusal(bool(reason), f"{reason}, so the run cannot change its number of ranks", [{"world_size": None}])
        for reason in obstacles
    ]
