"""One rank of a run: `python -m bench.rank.worker RUN_FOLDER`, or a fork that calls `main`.

The rank reads its configuration from `config.json` in the run folder. If the rank fails, it writes `errors/rank-N.json`
to the folder, for the launcher.
"""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.core import spec
from bench.core.config.run import RunConfig
from bench.core.config.syntax import Straggler
from bench.core.errors import BenchError, RunFailed
from bench.core.processes import own_rank
from bench.core.run_folder import RunFolder, write_json
from bench.datasets.base import Dataset, DatasetError
from bench.rank.checkpoint import Checkpointer, Restored
from bench.rank.data import pool_running_statistics_
from bench.rank.process import (
    device_time,
    end_process,
    group_of_one,
    process_group,
    rank_main,
    rendezvous_store,
    training_device,
)
from bench.rank.record import Recorder
from bench.rank.session import components, data_and_state, parts_of, way_to_agree
from bench.rank.trainer import Diverged, Trainer
from bench.strategies.base import BoundStrategy, CommandedRank, Strategy
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
    device = training_device(config)
    options: Strategy = spec.build("strategies", config.filled["strategy"])
    store = rendezvous_store(config.timeout_s) if options.ranks_may_leave else None
    group = process_group(device, config.timeout_s) if store is None else group_of_one()
    # If rank 0 tells a rank that the run has ended, that rank ends without an error.
    with contextlib.suppress(RunEnded), group:
        if (started := int(os.environ["WORLD_SIZE"])) != config.world_size:
            raise RuntimeError(f"the run has {config.world_size} ranks, but {started} were started")
        if len(set(gather_json(config.digest))) > 1:
            raise RunFailed(
                "the machines have different options or data; use the same command on each, except for --node-rank, "
                "with the same files and the same Python, and add --threads and --device if their cores or GPUs differ"
            )
        dataset, setup = components(config, device, store)
        if len(set(gather_json(bits_hash((*setup.model.parameters(), *setup.model.buffers()))))) > 1:
            raise RunFailed(f"ranks drew different initial weights from one seed; {way_to_agree(config.model, config)}")
        strategy = options.bind(setup)
        checkpointer = Checkpointer(config, folder)
        restored = checkpointer.restore(device)
        if isinstance(strategy, CommandedRank):
            if restored is not None:
                strategy.load_state_dict(restored.states[0])
            strategy.follow(checkpointer.save)
            checkpointer.wait()
        else:
            if config.straggler and (straggler := Straggler.parse(config.straggler)).rank == own_rank():
                slow_down(setup.model, straggler.slowdown)
            recorder = Recorder(config, folder, strategy, started_at, after=restored.step if restored else 0)
            _train(config, folder, strategy, recorder, dataset, device, checkpointer, restored)
        strategy.close()


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
    data, state = data_and_state(config, folder, dataset, strategy.loop, restored)
    profiler = None
    if config.profile:
        trace = str(folder.path / f"trace-rank-{own_rank()}.json")
        profiler = torch.profiler.profile(
            schedule=torch.profiler.schedule(wait=config.warmup_steps, warmup=1, active=config.profile, repeat=1),
            on_trace_ready=lambda profile: profile.export_chrome_trace(trace),
            record_shapes=True,
            # otherwise the thread of the exchange is not recorded
            experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True),
        )

    def has_joined() -> None:
        if folder.rendezvous.is_dir():  # else torchrun has started the ranks
            folder.joined(own_rank()).touch()

    with profiler or contextlib.nullcontext():
        # Join last, because any work between joining and the first step makes this rank late for an exchange.
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


def slow_down(model: nn.Module, slowdown: float) -> None:
    """Make forward and backward of every later training step take `slowdown` times as long.

    At the end of backward, before the last gradient is passed on, the rank sleeps for (slowdown - 1) times its
    computing time. Waiting for other ranks comes later and is not multiplied.

    Args:
        model: the network without any wrapper; hooks are added to it.
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
    """Return True if ranks of the run in this folder, except rank 0, may be lost and start again."""
    config = RunConfig.from_json(RunFolder(Path(path)).config)
    options: Strategy = spec.build("strategies", config.filled["strategy"])
    return options.ranks_may_leave


main = rank_main(RunConfig, run, USER_ERRORS)


if __name__ == "__main__":
    end_process(main(sys.argv[1]))
