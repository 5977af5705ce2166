"""Check the options of `bench compressors` and run the measurement in a process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.core import registry, spec
from bench.core.config.measurements import CompressorsConfig
from bench.core.errors import UsageError
from bench.launch.jobs.failure import WatchdogTimeouts
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.measurement import measure

if TYPE_CHECKING:
    from bench.datasets.base import Dataset
    from compressors.base import Compressor

BASELINE = "none"


def check(options: CompressorsConfig) -> CompressorsConfig:
    """Check the options and fill in all defaults but the device.

    Raises:
        UsageError: an option is unknown or out of range.
    """
    return dataclasses.replace(
        options,
        compressors=",".join(_compressors(options.compressors)),
        model=spec.short_text(spec.build("models", options.model)),
        dataset=spec.short_text(spec.build("datasets", options.dataset)),
        data_dir=str(Path(options.data_dir).absolute()),
    )


def prepare(options: CompressorsConfig) -> CompressorsConfig:
    """Check the options, fill in all defaults, and download the data set if it is needed and missing.

    Raises:
        UsageError: an option is unknown, out of range, or impossible on this machine.
    """
    from bench.launch.devices import choose_device

    config = dataclasses.replace(check(options), device=choose_device(options.device))
    dataset = cast("Dataset", spec.build("datasets", config.dataset))
    if config.gradients == "recorded" and not dataset.is_present(Path(config.data_dir)):
        dataset.prepare(Path(config.data_dir))
    return config


def execute(config: CompressorsConfig, on_report: Callable[[Mapping[str, Any]], None], server: ForkServer) -> None:
    """Run the measurement in a separate process, so that it does not share threads or memory.

    Args:
        config: from `prepare`.
        on_report: called with ``{"turn": compressor}`` after every timed turn, ``{"row": ...}`` for each compressor.
        server: starts the process; made with `fork_server.ENCODE`.

    Raises:
        RunFailed: the process failed or hung; the message names its log.
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
    """Return short spec texts without repetitions; None: all compressors, the baseline first."""
    from compressors.base import OwnHook, TorchHook

    if texts is None:
        built = registry.ask_each("compressors", lambda component: cast("Compressor", component()))
        names = [name for name, compressor in built.items() if not isinstance(compressor, TorchHook | OwnHook)]
        return sorted(names, key=lambda name: (name != BASELINE, name))
    chosen = {spec.short_text(compressor): compressor for compressor in map(_build, spec.split_list(texts))}
    for name, compressor in chosen.items():
        if isinstance(compressor, TorchHook):
            raise UsageError(
                f"{name} encodes inside PyTorch's own hook, where it cannot be timed; measure it with bench run"
            )
        if isinstance(compressor, OwnHook):
            raise UsageError(
                f"{name} encodes nothing itself; measure the compressors that it tries, such as topk or bf16"
            )
    return list(chosen)


def _build(text: str) -> Compressor:
    return cast("Compressor", spec.build("compressors", text))
