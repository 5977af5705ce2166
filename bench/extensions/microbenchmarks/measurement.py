"""Check the options of `bench collectives` and `bench compressors`, and run their measurements as jobs."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from bench.core import registry, spec
from bench.core.config.configuration import NOT_GIVEN
from bench.core.errors import UsageError
from bench.core.units import format_bytes, parse_sizes
from bench.extensions.microbenchmarks.options import BYTES_PER_ELEMENT, CollectivesConfig, CompressorsConfig, Dtype
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import WatchdogTimeouts
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.plan import choose_device, place, prepare_data
from bench.launch.run import OnReport, measure
from collectives.options import incompatibility
from collectives.refusals import refuse

if TYPE_CHECKING:
    from collectives.base import Collective

# Components with which the other components are compared; these come first.
BASELINE_COLLECTIVE, BASELINE_COMPRESSOR = "native", "none"
# Modules that the processes run.
SUM = "bench.extensions.microbenchmarks.collectives_worker"
ENCODE = "bench.extensions.microbenchmarks.compressors_worker"


# Sums: `bench collectives`.


def check_sums(options: CollectivesConfig) -> tuple[CollectivesConfig, list[str]]:
    """Check the options of `bench collectives`, and fill in every default except the device.

    Returns:
        The options, and for each named collective and compressor that do not work together, a sentence that says why.

    Raises:
        UsageError: an option is unknown, out of range, impossible on this machine, or contradicts another one.
    """
    config = place(options)
    if config.world_size < 2:
        raise UsageError("--world-size 1 leaves nothing to sum; give 2 or more")
    sizes = parse_sizes(config.sizes)
    for size in sizes:
        if size < BYTES_PER_ELEMENT[config.dtype]:
            raise UsageError(f"{size} bytes hold no {config.dtype} element; give larger --sizes")
    collectives = None if config.collectives is None else spec.split_list(config.collectives)
    for name in collectives or ():
        collective: Collective = spec.build("collectives", name)
        if collective.recodes or collective.keeps_residuals:
            from collectives.base import without_residuals

            raise UsageError(f"{name} needs the compressor of a training run; use {without_residuals(collective)}")
        with spec.usage_errors():
            refuse(collective.rank_refusals, config.world_size)
    pairs, left_out = _legal_pairs(spec.split_list(config.compressors), collectives, config.dtype)
    # All ranks on this machine hold tensors at the same time: for the sum and, to check the sum, all ranks' payloads.
    memory = psutil.virtual_memory().total
    largest, ranks = max(sizes), config.world_size // config.nnodes
    held = 2 + len({name for name, _ in pairs}) + (config.world_size if "none" in {name for _, name in pairs} else 1)
    if held * largest * ranks > memory:
        raise UsageError(
            f"{held} tensors of {format_bytes(largest)} on each of {ranks} ranks, some of them for checking sums, do "
            f"not fit into this machine's memory of {format_bytes(memory)}; give smaller --sizes"
        )
    return dataclasses.replace(config, pairs=tuple(pairs)), left_out


def measure_sums(config: CollectivesConfig, on_report: OnReport, server: ForkServer) -> None:
    """Start the ranks of `bench collectives`, and return when all of their processes have ended.

    Args:
        config: complete options.
        on_report: called with each report of rank 0: ``{"ended": [size, pair]}`` after each round of sums, with the
            size and the collective and compressor as texts for the user, and ``{"row": ..., "extras": ...}`` for each
            finished row.
        server: starts the ranks; made with `SUM`.

    Raises:
        UsageError: this machine does not support virtual hosts, or latency and loss on their links.
        RunFailed: a rank failed or hung, or the network could not be set up; the message names the logs.
        Interrupted: the user stopped the measurement.
    """
    measure(
        "collectives",
        config,
        lambda folder: torchrun.launch(config, folder, server),
        WatchdogTimeouts.with_job(config),
        on_report,
    )


def _legal_pairs(
    compressors: Sequence[str], collectives: Sequence[str] | None, dtype: Dtype
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the pairs of collective and compressor that work together, and the reasons why other named pairs do not.

    Args:
        compressors: compressors as text, such as `topk:ratio=0.01`.
        collectives: collectives as text; None stands for all collectives, with `BASELINE_COLLECTIVE` first.
        dtype: type of the elements of the tensor that is summed.

    Returns:
        Tuples (collective, compressor) as text, sorted by compressor, without the options that have their default; and
        one sentence for each pair that does not work together, if the user named the collectives.

    Raises:
        UsageError: a component or option does not exist, or a named component is in no pair that works.
    """
    from compressors.base import PerLayer

    senders = _built("compressors", compressors)
    usable = registry.ask_each("collectives", lambda component: component()) if collectives is None else ()
    sums = _built("collectives", collectives or sorted(usable, key=lambda name: (name != BASELINE_COLLECTIVE, name)))
    for name, sender in senders.items():
        if not isinstance(sender, PerLayer):
            raise UsageError(f"{name} does not send one payload per layer; measure it with `bench run`")
        if dtype.startswith("int") and sender.component_name != BASELINE_COMPRESSOR:
            raise UsageError(f"{name} compresses floating-point tensors; sum --dtype {dtype} with --compressors none")
    reasons = {
        (name, sender_name): incompatibility(sender.check_compatible, collective)
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


def _built(kind: str, texts: Sequence[str]) -> dict[str, Any]:
    return {str(component): component for component in (spec.build(kind, text) for text in texts)}


# Encoding: `bench compressors`.


def check_encoding(options: CompressorsConfig) -> CompressorsConfig:
    """Return the options of `bench compressors` with every default except the device.

    Raises:
        UsageError: an option is unknown or out of range, or a named compressor cannot be timed.
    """
    from compressors.base import DdpHook

    if options.compressors is NOT_GIVEN:
        made = registry.ask_each("compressors", lambda component: component())
        names = [name for name, compressor in made.items() if not isinstance(compressor, DdpHook)]
        names.sort(key=lambda name: (name != BASELINE_COMPRESSOR, name))
    else:
        chosen = _built("compressors", spec.split_list(options.compressors))
        for name, compressor in chosen.items():
            if isinstance(compressor, DdpHook):
                raise UsageError(
                    f"{name} works through DDP's own hook, where it cannot be timed alone; measure it with bench run"
                )
        names = list(chosen)
    return dataclasses.replace(
        options,
        compressors=",".join(names),
        model=str(spec.build("models", options.model)),
        dataset=str(spec.build("datasets", options.dataset)),
        data_dir=str(Path(options.data_dir).absolute()),
    )


def prepare_encoding(config: CompressorsConfig) -> CompressorsConfig:
    """Return the options from `check_encoding` with the device filled in; download the data set if it is needed.

    Raises:
        UsageError: this machine lacks the device.
    """
    if config.gradients == "recorded":
        prepare_data(config.dataset, config.data_dir)
    return dataclasses.replace(config, device=choose_device(config.device))


def measure_encoding(config: CompressorsConfig, on_report: OnReport, server: ForkServer) -> None:
    """Measure compressors in a separate process, which shares no threads and no memory with the command.

    Args:
        config: complete options.
        on_report: called with each report of the process: ``{"ended": ["", compressor]}`` after each timed pass over a
            gradient, and ``{"row": ...}`` for each compressor.
        server: starts the process; made with `ENCODE`.

    Raises:
        RunFailed: the process failed or hung; the message names its log.
        Interrupted: the user stopped the measurement.
    """
    measure(
        "compressors",
        config,
        lambda folder: server.start(folder, num_ranks=1, threads=config.threads, device=config.device),
        # this process waits for no other one, so silence means that it hangs
        WatchdogTimeouts(first_s=config.timeout_s, next_s=config.timeout_s),
        on_report,
    )
