"""From the options of `bench collectives` to a checked sweep, and the sweep as a torchrun job from start to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from bench.core import registry, spec
from bench.core.collectives_config import CollectivesConfig, Dtype
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.launch import torchrun
from bench.launch.devices import choose_device
from bench.launch.failure import explain, reports_of
from bench.launch.fork_server import ForkServer
from bench.launch.old_spellings import refuse_old_spelling
from bench.launch.placement import place
from bench.launch.progress import ProgressReader
from bench.launch.scratch import scratch_folder
from bench.launch.watchdog import WatchdogTimeouts
from collectives.base import Collective
from collectives.server import Server
from compressors.base import Compressor

BASELINE = "native"

Pair = tuple[str, str]
"""(collective, compressor), as spec texts with only the options that differ from their default."""


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
    collectives = None if config.collectives is None else spec.split_list(config.collectives)
    for name in collectives or ():
        _check_collective(name, config.world_size)
    pairs, left_out = legal_pairs(spec.split_list(config.compressors), collectives, config.dtype)
    device = choose_device(config.device, num_needed=config.world_size)
    return dataclasses.replace(config, pairs=tuple(pairs), device=device), left_out


def legal_pairs(
    compressors: Sequence[str], collectives: Sequence[str] | None, dtype: Dtype
) -> tuple[list[Pair], list[str]]:
    """(pairs that can work together, sorted by compressor; why the others of those that were named cannot).

    Args:
        compressors: spec texts.
        collectives: spec texts; None: all there are.
        dtype: of the tensor that is summed.

    Raises:
        UsageError: a component or option that does not exist, or one that was named and finds no partner.
    """
    senders = _built("compressors", compressors)
    sums = _built("collectives", collectives if collectives is not None else _all_collectives())
    for name, sender in senders.items():
        _check_sender(name, cast(Compressor, sender), dtype)
    reasons = {
        (name, sender_name): cast(Compressor, sender).refusal(cast(Collective, collective))
        for sender_name, sender in senders.items()
        for name, collective in sums.items()
    }
    pairs = [pair for pair, reason in reasons.items() if reason is None]
    named = [(1, name) for name in senders] + [(0, name) for name in sums if collectives is not None]
    for part, name in named:
        if not any(pair[part] == name for pair in pairs):
            raise UsageError(next(reason for pair, reason in reasons.items() if pair[part] == name and reason))
    left_out = [reason for reason in reasons.values() if reason] if collectives is not None else []
    return pairs, left_out


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
    with scratch_folder("collectives") as folder:
        folder.config.write_text(config.to_json(), encoding="utf-8")
        try:
            with torchrun.termination_as_interrupt():
                job = torchrun.launch(config, folder, server)
                ending = torchrun.watch(
                    job, ProgressReader(folder.progress), WatchdogTimeouts.with_job(config), on_report
                )
        except KeyboardInterrupt:
            raise Interrupted("stopped by the user; the rows so far are kept") from None
        if ending.silent_s is not None and not reports_of(folder):
            raise RunFailed(f"no turn ended within {ending.silent_s:g} s; raise --timeout or lower --iters")
        if ending.exit_code != 0:
            raise RunFailed(explain(folder))


def _built(kind: str, texts: Sequence[str]) -> dict[str, Any]:
    """Components by their short spec text, each once."""
    components = [spec.build(kind, text) for text in texts]
    return {spec.short_text(component): component for component in components}


def _all_collectives() -> list[str]:
    """The baseline first."""
    return sorted(registry.entries("collectives"), key=lambda name: (name != BASELINE, name))


def _check_sender(name: str, compressor: Compressor, dtype: Dtype) -> None:
    if compressor.engine_hook or type(compressor).reduce is not Compressor.reduce:
        raise UsageError(f"{name} needs several rounds for one sum; see what it costs with `bench run`")
    if dtype.startswith("int") and compressor.component_name != "none":
        raise UsageError(f"{name} compresses floating-point tensors; sum --dtype {dtype} with --compressors none")


def _check_collective(text: str, world_size: int) -> None:
    refuse_old_spelling(text)
    collective = cast(Collective, spec.build("collectives", text))
    if isinstance(collective, Server) and collective.downlink == "recode":
        raise UsageError("server:downlink=recode needs the compressor of a training run; use downlink=dense or union")
    if reason := collective.ranks_refusal(world_size):
        raise UsageError(reason)
