"""From the options of `bench compressors` to a checked measurement, and the process that makes it, start to end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.core import registry, spec
from bench.core.config.compressors import CompressorsConfig
from bench.core.errors import UsageError
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.jobs.watchdog import WatchdogTimeouts
from bench.launch.measurement import measure

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from compressors.base import Compressor

BASELINE = "none"


def check(asked: CompressorsConfig) -> CompressorsConfig:
    """Fill in every default but the device.

    Raises:
        UsageError: something is unknown or out of range.
    """
    return dataclasses.replace(
        asked,
        compressors=",".join(_compressors(asked.compressors)),
        model=spec.short_text(spec.build("models", asked.model)),
        dataset=spec.short_text(spec.build("datasets", asked.dataset)),
        data_dir=str(Path(asked.data_dir).absolute()),
    )


def prepare(asked: CompressorsConfig) -> CompressorsConfig:
    """Fill in every default, and fetch the data set where it is needed and absent.

    Raises:
        UsageError: something is unknown, out of range, or impossible here.
    """
    from bench.launch.devices import choose_device

    config = dataclasses.replace(check(asked), device=choose_device(asked.device))
    dataset = cast("Dataset", spec.build("datasets", config.dataset))
    if config.gradients == "recorded" and not dataset.is_present(Path(config.data_dir)):
        dataset.prepare(Path(config.data_dir))
    return config


def execute(config: CompressorsConfig, on_report: Callable[[Mapping[str, Any]], None], server: ForkServer) -> None:
    """Measure in a process of its own, whose threads and memory are nobody else's.

    Args:
        config: from `prepare`.
        on_report: called with ``{"turn": compressor}`` after every timed turn, ``{"row": ...}`` for each compressor.
        server: starts the process; made with `fork_server.ENCODE`.

    Raises:
        RunFailed: the process failed or hung; its log is kept and named.
        Interrupted: the user stopped it.
    """
    measure(
        "compressors",
        config,
        lambda folder: server.start(folder, num_ranks=1, threads=config.threads, device=config.device),
        WatchdogTimeouts.with_one_process(config.timeout_s),
        on_report,
    )


def _compressors(texts: str | None) -> list[str]:
    """Short spec texts, each once; the baseline first where all are asked for."""
    if texts is None:
        built = registry.ask_each("compressors", lambda component: cast("Compressor", component()))
        names = [name for name, compressor in built.items() if not (compressor.engine_hook or compressor.chooses)]
        return sorted(names, key=lambda name: (name != BASELINE, name))
    chosen = {spec.short_text(compressor): compressor for compressor in map(_build, spec.split_list(texts))}
    for name, compressor in chosen.items():
        if compressor.engine_hook:
            raise UsageError(
                f"{name} encodes inside PyTorch's own hook, out of sight; see what it costs with bench run"
            )
        if compressor.chooses:
            raise UsageError(f"{name} encodes nothing itself; measure the compressors that it tries, topk or bf16 say")
    return list(chosen)


def _build(text: str) -> Compressor:
    return cast("Compressor", spec.build("compressors", text))
