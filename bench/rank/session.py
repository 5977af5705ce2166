"""Build a rank's components, network, samples and restored state, for training and for timing."""

import functools
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.errors import RunFailed
from bench.core.processes import own_rank
from bench.core.rows import RowWriter
from bench.core.run_folder import RunFolder
from bench.core.schema import PARTITION
from bench.datasets.base import Dataset, Samples
from bench.models.base import seeded_network
from bench.rank import partition
from bench.rank.checkpoint import Restored, resized
from bench.rank.data import RankData
from bench.rank.process import link_rates, return_memory
from bench.strategies.base import Setup
from collectives.direct import on_links
from collectives.transport.process_group import gather_json
from gradwire.exchange.packed_state import bits_hash


def components(config: RunConfig, device: torch.device, store: Store | None = None) -> tuple[Dataset, Setup]:
    """Build the data set, and the `Setup` that the strategy gets on this rank; the network has its initial weights.

    Args:
        config: the run's configuration.
        device: the device on which this rank computes.
        store: the rendezvous store of the whole run if every rank has its own process group; None otherwise.
    """
    dataset: Dataset = spec.build("datasets", config.filled["dataset"])
    setup = Setup(
        config=config,
        model=seeded_network(config.filled["model"], dataset, config.seed).to(device),
        compressor=spec.build("compressors", config.filled["compressor"]),
        collective=on_links(spec.build("collectives", config.filled["collective"]), link_rates(config)),
        optimizer=spec.build("optimizers", config.filled["optimizer"]),
        device=device,
        rendezvous_store=store,
    )
    return dataset, setup


def data_and_state(
    config: RunConfig,
    folder: RunFolder,
    dataset: Dataset,
    group: dist.ProcessGroup | None,
    restored: Restored | None,
) -> tuple[RankData, dict[str, Any] | None]:
    """Return this rank's samples, and the state from which the rank resumes (None in a new run).

    Rank 0 also writes `partition.csv`.

    Raises:
        RunFailed: ranks have different data, or a shard is smaller than a batch.
    """
    train, test, loaded_by = _parts(config)
    known = [train.targets, test.targets]
    known += [part.inputs[:100] for part in (train, test) if isinstance(part.inputs, torch.Tensor)]
    if len(set(gather_json(bits_hash(known), group))) > 1:
        raise RunFailed(f"ranks loaded different data with one seed; {way_to_agree(config.dataset, config)}")
    data = RankData.of(config, dataset, train, test)
    if own_rank() == 0 and not config.holdout_size:  # yardsticks describe the test set
        data.columns.update(dataset.yardsticks())
    if (smallest := min(map(len, data.shards))) < config.samples_per_step:
        raise RunFailed(
            f"--partition {config.partition} leaves {smallest} samples per rank, and a step needs "
            f"{config.samples_per_step}; lower --batch-size or --world-size"
        )
    if own_rank() == 0 and dataset.has_classes:
        folder.partition.unlink(missing_ok=True)  # the old file may be for another number of ranks
        counts = partition.class_counts(train.targets, data.shards)
        RowWriter(folder.partition, PARTITION).extend(
            {"run_id": folder.run_id, "rank": rank, "class": label, "samples": int(counts[rank, label])}
            for rank, label in counts.nonzero().tolist()
        )
    state = None if restored is None else restored.states[0]
    if restored is not None and restored.waiting is not None:
        state = resized(restored.states, config, dist.get_rank(), restored.waiting, dataset, train)
    # Forked ranks share the samples that `prepare` has loaded; a copy of each rank's part would need more memory.
    if loaded_by == os.getpid() and not dataset.keeps_samples:
        taken_over = [each["rest"][2].cpu() for each in (state or {"batches": []})["batches"] if each["rest"]]
        return_memory()  # memory that loading needed, before copies are made
        data = data.own_part(group, taken_over)
        _load.cache_clear()
        del train, test
        return_memory()
    return data, state


def way_to_agree(component: str, config: RunConfig) -> str:
    """Return advice for the user if a component (a model or data set) is not the same on all ranks."""
    spec_of = spec.parse(component)
    ways = []
    if spec_of.is_function:
        ways.append(
            f"{spec_of.name} must draw from torch, numpy.random or random, which are seeded, and not from the clock, "
            "os.urandom or numpy.random.default_rng() without a seed"
        )
    if config.nnodes > 1 or not ways:
        ways.append("every machine must have the same files and the same versions of torch and numpy")
    return "; ".join(ways)


def parts_of(config: RunConfig) -> tuple[Samples, Samples]:
    """Return the training samples and the samples to evaluate on: the test set, or held-out training samples."""
    return _parts(config)[:2]


def _parts(config: RunConfig) -> tuple[Samples, Samples, int]:
    """Return the training samples, the samples to evaluate on, and the id of the process that loaded them."""
    load = functools.partial(
        _load,
        config.filled["dataset"],
        config.data_dir,
        config.seed,
        train_size=config.train_size,
        test_size=config.test_size,
        holdout_size=config.holdout_size,
    )
    train, test, loaded_by = load()
    if loaded_by != os.getpid() and not all(isinstance(part.inputs, torch.Tensor) for part in (train, test)):
        _load.cache_clear()  # a forked process must not share open files with others
        return load()
    return train, test, loaded_by


@functools.lru_cache(maxsize=1)
def _load(
    dataset: str, data_dir: str, seed: int, *, train_size: int | None, test_size: int | None, holdout_size: int
) -> tuple[Samples, Samples, int]:
    component: Dataset = spec.build("datasets", dataset)
    train, test = component.load(Path(data_dir), seed=seed, train_size=train_size, test_size=test_size)
    return *(train.split(holdout_size) if holdout_size else (train, test)), os.getpid()
