"""From the options of `bench collectives` to a checked sweep, and the sweep as a torchrun job from start to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from bench.core import spec
from bench.core.config.collectives import CollectivesConfig
from bench.core.errors import UsageError
from bench.core.units import format_bytes
from bench.launch.jobs import torchrun
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.jobs.placement import place
from bench.launch.jobs.watchdog import WatchdogTimeouts
from bench.launch.measurement import measure


def resolve(asked: CollectivesConfig) -> tuple[CollectivesConfig, list[str]]:
    """The sweep with every default filled in, and why pairs that were asked for are left out.

    Raises:
        UsageError: something is unknown, out of range, illegal together, or impossible here.
    """
    config = place(asked)
    if config.world_size < 2:
        raise UsageError("--world-size 1 leaves nothing to sum; give 2 or more")
    for size in config.sizes_bytes:
        if not config.count(size):
            raise UsageError(f"{size} bytes hold no {config.dtype} element; give larger --sizes")
    from bench.launch.devices import choose_device
    from bench.launch.pairs import check_collective, legal_pairs

    collectives = None if config.collectives is None else spec.split_list(config.collectives)
    for name in collectives or ():
        check_collective(name, config.world_size)
    pairs, left_out = legal_pairs(spec.split_list(config.compressors), collectives, config.dtype)
    _check_memory(config, pairs)
    device = choose_device(config.device, num_needed=config.world_size)
    return dataclasses.replace(config, pairs=tuple(pairs), device=device), left_out


def execute(config: CollectivesConfig, on_report: Callable[[Mapping[str, Any]], None], server: ForkServer) -> None:
    """Run the sweep; returns when nothing of the job is left.

    Args:
        config: from `resolve`.
        on_report: called with what rank 0 says, as it says it: ``{"turn": [collective, compressor, size_bytes]}`` after
            every turn, ``{"row": ..., "extras": ...}`` for each finished row.
        server: starts the ranks; made with `fork_server.SUM`.

    Raises:
        UsageError: virtual hosts, or latency and loss, are not possible here.
        RunFailed: a rank failed or hung, or the network could not be set up; the logs are kept and named.
        Interrupted: the user stopped it.
    """
    timeouts = WatchdogTimeouts.with_job(config)
    measure("collectives", config, lambda folder: torchrun.launch(config, folder, server), timeouts, on_report)


def _check_memory(config: CollectivesConfig, pairs: Sequence[tuple[str, str]]) -> None:
    """Every rank on this machine holds its tensor, all ranks' payloads, its sum, and what each collective must make."""
    memory = psutil.virtual_memory().total
    largest, ranks = max(config.sizes_bytes), config.world_size // config.nnodes
    collectives, compressors = (set(names) for names in zip(*pairs, strict=True))
    held = 2 + len(collectives) + (config.world_size if "none" in compressors else 1)
    if held * largest * ranks > memory:
        raise UsageError(
            f"{format_bytes(largest)}, {held} times on each of {ranks} ranks with what sums are checked by, do not fit "
            f"into this machine's memory of {format_bytes(memory)}; give smaller --sizes"
        )
