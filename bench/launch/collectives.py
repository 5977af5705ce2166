"""Check the options of `bench collectives` and run the sweep as a job."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from bench.core import spec
from bench.core.config.measurements import CollectivesConfig
from bench.core.errors import UsageError
from bench.core.units import format_bytes
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import WatchdogTimeouts
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.jobs.placement import place
from bench.launch.measurement import measure


def resolve(options: CollectivesConfig) -> tuple[CollectivesConfig, list[str]]:
    """Return the sweep with all defaults filled in, and a sentence for each named pair that is left out.

    Raises:
        UsageError: an option is unknown, out of range, impossible on this machine, or contradicts another one.
    """
    config = place(options)
    if config.world_size < 2:
        raise UsageError("--world-size 1 leaves nothing to sum; give 2 or more")
    for size in config.sizes_bytes:
        if not config.count(size):
            raise UsageError(f"{size} bytes hold no {config.dtype} element; give larger --sizes")
    from bench.launch.devices import choose_device
    from bench.launch.layer_plan import check_collective, legal_pairs

    collectives = None if config.collectives is None else spec.split_list(config.collectives)
    for name in collectives or ():
        check_collective(name, config.world_size)
    pairs, left_out = legal_pairs(spec.split_list(config.compressors), collectives, config.dtype)
    _check_memory(config, pairs)
    device = choose_device(config.device, num_needed=config.world_size)
    return dataclasses.replace(config, pairs=tuple(pairs), device=device), left_out


def execute(config: CollectivesConfig, on_report: Callable[[Mapping[str, Any]], None], server: ForkServer) -> None:
    """Run the sweep; return when no process of the job is left.

    Args:
        config: from `resolve`.
        on_report: called with each report of rank 0: ``{"turn": [collective, compressor, size_bytes]}`` after every
            turn, ``{"row": ..., "extras": ...}`` for each finished row.
        server: starts the ranks; made with `fork_server.SUM`.

    Raises:
        UsageError: this machine does not support virtual hosts, or latency and loss on their links.
        RunFailed: a rank failed or hung, or the network could not be set up; the message names the logs.
        Interrupted: the user stopped it.
    """
    timeouts = WatchdogTimeouts.with_job(config)
    measure("collectives", config, lambda folder: torchrun.launch(config, folder, server), timeouts, on_report)


def _check_memory(config: CollectivesConfig, pairs: Sequence[tuple[str, str]]) -> None:
    """Check that the tensors that all ranks on this machine hold at once fit into its memory."""
    memory = psutil.virtual_memory().total
    largest, ranks = max(config.sizes_bytes), config.world_size // config.nnodes
    collectives, compressors = (set(names) for names in zip(*pairs, strict=True))
    held = 2 + len(collectives) + (config.world_size if "none" in compressors else 1)
    if held * largest * ranks > memory:
        raise UsageError(
            f"{held} tensors of {format_bytes(largest)} on each of {ranks} ranks, some of them for checking sums, do "
            f"not fit into this machine's memory of {format_bytes(memory)}; give smaller --sizes"
        )
