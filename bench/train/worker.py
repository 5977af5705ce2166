"""One rank of a run: `python -m bench.train.worker RUN_FOLDER`, or a fork that calls `main`.

The rank reads its configuration from `config.json` in the run folder. If the rank fails, it writes `errors/rank-N.json`
to the folder, for the launcher.
"""

import contextlib
import ctypes
import functools
import os
import platform
import struct
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.errors import BenchError, RunFailed
from bench.core.processes import own_rank
from bench.core.rows import RowWriter
from bench.core.run_folder import RunFolder, write_json
from bench.core.schema import PARTITION
from bench.datasets.base import Dataset, DatasetError, Samples
from bench.models.base import seeded_network
from bench.strategies.base import BoundStrategy, CommandedRank, Setup, Strategy
from bench.train import partition
from bench.train.checkpoint import Checkpointer, Restored, resized
from bench.train.data import RankData, pool_running_statistics_
from bench.train.rank import (
    device_time,
    end_process,
    group_of_one,
    link_rates,
    process_group,
    rank_main,
    rendezvous_store,
    set_up_device,
)
from bench.train.record import Recorder
from bench.train.trainer import Diverged, Trainer
from collectives.direct import on_links
from collectives.options import OptionError
from collectives.payloads.fields import PayloadError
from collectives.transport.base import MembershipError, RunEnded, TransportError
from collectives.transport.process_group import gather_json
from gradwire.exchange.packed_state import bits_hash
from gradwire.step_guard import NonFiniteGradient

# Errors whose message is already one sentence for the user; anything else is shown with its type.
USER_ERRORS = (
    BenchError,
    DatasetError,
    Diverged,
    MembershipError,
    NonFiniteGradient,
    OptionError,
    PayloadError,
    TransportError,
)


def run(config: RunConfig, folder: RunFolder) -> None:
    """Set up this rank, train to the end of the run, and write `status.json` on rank 0."""
    started_at = time.time()
    device = set_up_device(config.device, config.threads)
    if device.type == "cpu":
        use_batch_scheduling()
    options: Strategy = spec.build("strategies", config.filled["strategy"])
    store = rendezvous_store(config.timeout_s) if options.ranks_may_leave else None
    group = process_group(device, config.timeout_s) if store is None else group_of_one()
    # A rank that rank 0 tells that the run has ended leaves without an error.
    with contextlib.suppress(RunEnded), group:
        if (started := int(os.environ["WORLD_SIZE"])) != config.world_size:
            raise RuntimeError(f"the run has {config.world_size} ranks, but {started} were started")
        if len(set(gather_json(config.digest))) > 1:
            raise RunFailed(
                "the machines have different options or data; use the same command on each, except for --node-rank, "
                "with the same files and the same Python, and add --threads and --device if their cores or GPUs differ"
            )
        dataset: Dataset = spec.build("datasets", config.filled["dataset"])
        model = seeded_network(config.filled["model"], dataset, config.seed).to(device)
        if len(set(gather_json(bits_hash((*model.parameters(), *model.buffers()))))) > 1:
            raise RunFailed(
                f"ranks drew different initial weights from one seed; {_way_to_agree(config.model, config)}"
            )
        strategy = options.bind(
            Setup(
                config=config,
                model=model,
                compressor=spec.build("compressors", config.filled["compressor"]),
                collective=on_links(spec.build("collectives", config.filled["collective"]), link_rates(config)),
                optimizer=spec.build("optimizers", config.filled["optimizer"]),
                device=device,
                rendezvous_store=store,
            )
        )
        checkpointer = Checkpointer(config, folder)
        restored = checkpointer.restore(device)
        if isinstance(strategy, CommandedRank):
            if restored is not None:
                strategy.load_state_dict(restored.states[0])
            strategy.follow(checkpointer.save)
            checkpointer.wait()
        else:
            if config.straggler and (straggler := Straggler.parse(config.straggler)).rank == own_rank():
                slow_down(model, straggler.slowdown)
            recorder = Recorder(config, folder, strategy, started_at, after=restored.step if restored else 0)
            _train(config, folder, strategy, recorder, dataset, device, checkpointer, restored)
        strategy.close()


def _way_to_agree(component: str, config: RunConfig) -> str:
    """Return what to do if a component, a model or data set, is not the same on all ranks."""
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


def _train(
    config: RunConfig,
    folder: RunFolder,
    strategy: BoundStrategy,
    recorder: Recorder,
    dataset: Dataset,
    device: torch.device,
    checkpointer: Checkpointer,
    restored: Restored | None,
) -> None:
    """Run the training loop, from the restored state if there is one; rank 0 then writes `status.json`."""
    data, state = _data_and_state(config, folder, dataset, strategy.loop, restored)
    profiler = None
    if config.profile:
        trace = str(folder.path / f"trace-rank-{own_rank()}.json")
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=config.warmup_steps, warmup=1, active=config.profile, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(trace),
        )

    def has_joined() -> None:
        if folder.rendezvous.is_dir():  # else torchrun has started the ranks
            folder.joined(own_rank()).touch()

    with profiler or contextlib.nullcontext():
        # Last, because what this rank does before its first step makes it late for an exchange.
        strategy.join(while_waiting=recorder.progress.repeat, has_joined=has_joined)
        trainer = Trainer(
            config=config,
            strategy=strategy,
            dataset=dataset,
            data=data,
            recorder=recorder,
            device=device,
            profiler=profiler,
            save=checkpointer.save,
        )
        if state is not None:
            trainer.resume(state)
        trainer.run()
    checkpointer.wait()
    if config.save_model:
        pool_running_statistics_(strategy.model, strategy.loop)
    if own_rank() == 0:
        if config.save_model:
            torch.save(strategy.model.state_dict(), folder.model)
        head = {"status": "ok", "error": "", "run_id": folder.run_id}
        write_json(folder.status, head | {name: recorder.last_row.get(name) for name in _RESULT})


def _data_and_state(
    config: RunConfig,
    folder: RunFolder,
    dataset: Dataset,
    group: dist.ProcessGroup | None,
    restored: Restored | None,
) -> tuple[RankData, dict[str, Any] | None]:
    """Return this rank's samples, and the state with which it resumes (None in a new run).

    Rank 0 also writes `partition.csv`.

    Raises:
        RunFailed: ranks have different data, or a shard is smaller than a batch.
    """
    train, test, loaded_by = _parts(config)
    known = [train.targets, test.targets]
    known += [part.inputs[:100] for part in (train, test) if isinstance(part.inputs, torch.Tensor)]
    if len(set(gather_json(bits_hash(known), group))) > 1:
        raise RunFailed(f"ranks loaded different data with one seed; {_way_to_agree(config.dataset, config)}")
    data = RankData.of(config, dataset, train, test)
    if own_rank() == 0 and not config.holdout_size:  # held-out training samples are of another text
        data.columns.update(dataset.yardsticks())
    if (smallest := min(map(len, data.shards))) < config.samples_per_step:
        raise RunFailed(
            f"--partition {config.partition} leaves {smallest} samples per rank, and a step needs "
            f"{config.samples_per_step}; lower --batch-size or --world-size"
        )
    if own_rank() == 0 and dataset.has_classes:
        folder.partition.unlink(missing_ok=True)  # of another number of ranks
        counts = partition.class_counts(train.targets, data.shards)
        RowWriter(folder.partition, PARTITION).extend(
            {"run_id": folder.run_id, "rank": rank, "class": label, "samples": int(counts[rank, label])}
            for rank, label in counts.nonzero().tolist()
        )
    state = None if restored is None else restored.states[0]
    if restored is not None and restored.waiting is not None:
        state = resized(restored.states, config, dist.get_rank(), restored.waiting, dataset, train)
    # Forked ranks share the samples that `prepare` has loaded; copies of their parts would add to these.
    if loaded_by == os.getpid() and not dataset.keeps_samples:
        taken_over = [each["rest"][2].cpu() for each in (state or {"batches": []})["batches"] if each["rest"]]
        return_memory()  # what loading needed, before copies are made
        data = data.own_part(group, taken_over)
        _load.cache_clear()
        del train, test
        return_memory()
    return data, state


def return_memory() -> None:
    """Return freed memory to the kernel, where glibc can; otherwise it stays with the process."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


# The columns of the last row that `status.json` repeats.
_RESULT = (
    "epoch",
    "step",
    "test_accuracy",
    "test_bits_per_byte",
    "train_time_s",
    "wall_time_s",
    "samples_per_s",
    "time_to_target_s",
    "replicas_in_sync",
)


def prepare(path: str) -> None:
    """Load a run's data in the process from which the ranks are forked, so that all ranks share one copy.

    A later run with the same data, forked from the same process, shares the copy too.

    Args:
        path: the run's folder.

    Raises:
        Exception: any exception that a rank would raise while loading the data.
    """
    config = RunConfig.from_json(RunFolder(Path(path)).config)
    parts_of(config)
    dataset: Dataset = spec.build("datasets", config.filled["dataset"])
    dataset.yardsticks()  # takes time, and is kept for the ranks


def ranks_may_leave(path: str) -> bool:
    """Return True if the ranks of the run in this folder may be lost, except rank 0, and start again."""
    config = RunConfig.from_json(RunFolder(Path(path)).config)
    options: Strategy = spec.build("strategies", config.filled["strategy"])
    return options.ranks_may_leave


def parts_of(config: RunConfig) -> tuple[Samples, Samples]:
    """Return the training samples and the samples to evaluate on: the test set, or held-out training samples."""
    return _parts(config)[:2]


def _parts(config: RunConfig) -> tuple[Samples, Samples, int]:
    """Return what `parts_of` returns, and the id of the process that has loaded the samples."""
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


def slow_down(model: nn.Module, slowdown: float) -> None:
    """Make forward and backward of every later training step take `slowdown` times as long.

    At the end of backward, before the last gradient is passed on, the rank sleeps for (slowdown - 1) times its
    computing time. Waiting for other ranks comes later and is not multiplied.

    Args:
        model: the network without any wrapper, which gets hooks.
        slowdown: factor, at least 1.
    """
    device = next(model.parameters()).device
    started = 0.0

    def begin(_module: nn.Module, _inputs: Any) -> None:
        nonlocal started
        started = device_time(device)

    def delay(_gradients: Any) -> None:
        time.sleep((slowdown - 1) * (device_time(device) - started))

    model.register_forward_pre_hook(begin)
    torch.autograd.graph.register_multi_grad_hook([p for p in model.parameters() if p.requires_grad], delay)


main = rank_main(RunConfig, run, USER_ERRORS)


SLICE_S = 0.02

_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274, "armv7l": 380}  # number of the system call
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")  # size, policy, flags, nice, priority, runtime, deadline, period


def use_batch_scheduling() -> None:
    """Request batch scheduling and long time slices for the calling thread and all threads that it starts later.

    Only the order of work changes, not its result. If the run was started with another policy (`chrt --idle`), that
    policy stays. If the kernel refuses or is not Linux, scheduling stays as it is, and a message is printed on stderr
    (the rank's log).
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        print(
            "batch scheduling is not supported on this platform; ranks that share cores interrupt each other",
            file=sys.stderr,
        )
        return
    if os.sched_getscheduler(0) not in (os.SCHED_OTHER, os.SCHED_BATCH):
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_BATCH, 0, nice, 0, round(SLICE_S * 1e9), 0, 0)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, ctypes.c_char_p(attributes), 0):
        reason = os.strerror(ctypes.get_errno())
        print(
            f"the kernel refused batch scheduling ({reason}); ranks that share cores interrupt each other",
            file=sys.stderr,
        )


if __name__ == "__main__":
    end_process(main(sys.argv[1]))
