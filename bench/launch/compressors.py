"""From the options of `bench compressors` to a checked measurement, and the process that makes it, start to end."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch

from bench.core import registry, spec
from bench.core.compressors_config import CompressorsConfig
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.run_folder import RunFolder, read_json
from bench.datasets.base import Dataset
from bench.launch import torchrun
from bench.launch.compressors_request import CompressorsRequest
from bench.launch.progress import ProgressReader
from bench.launch.scratch import scratch_folder
from bench.launch.watchdog import WatchdogTimeouts
from compressors.base import Compressor

MODULE = "bench.micro.compressors_worker"
BASELINE = "none"


def plan(request: CompressorsRequest) -> CompressorsConfig:
    """The measurement with every default filled in.

    Raises:
        UsageError: something is unknown, out of range, or impossible here.
    """
    dataset = cast(Dataset, spec.build("datasets", request.dataset))
    given = dataclasses.asdict(request)
    del given["timeout_s"]
    given |= {
        "compressors": _compressors(request.compressors),
        "model": spec.short_text(spec.build("models", request.model)),
        "dataset": spec.short_text(dataset),
        "device": _device(request.device),
        "data_dir": str(Path(request.data_dir).absolute()),
    }
    if request.gradients == "recorded" and not dataset.is_present(Path(request.data_dir)):
        dataset.prepare(Path(request.data_dir))
    return CompressorsConfig(**given)


def execute(config: CompressorsConfig, timeout_s: float, on_report: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure in a process of its own, whose threads and memory are nobody else's.

    Args:
        config: from `plan`.
        timeout_s: stop when nothing was reported for so long.
        on_report: called with ``{"turn": compressor}`` after every timed turn, ``{"row": ...}`` for each compressor.

    Raises:
        RunFailed: the process failed or hung; its log is kept and named.
        Interrupted: the user stopped it.
    """
    variables = torchrun.variables(config.threads) | {"LOCAL_RANK": "0"}
    with scratch_folder("compressors") as folder:
        folder.config.write_text(config.to_json(), encoding="utf-8")
        try:
            with torchrun.termination_as_interrupt():
                command = [sys.executable, "-m", MODULE, str(folder.path)]
                job = torchrun.start(command, variables, folder.logs / "worker.log")
                timeouts = WatchdogTimeouts.with_one_process(timeout_s)
                ending = torchrun.watch(job, ProgressReader(folder.progress), timeouts, on_report)
        except KeyboardInterrupt:
            raise Interrupted("stopped by the user; nothing was written") from None
        if ending.silent_s is not None:
            raise RunFailed(f"no turn ended within {ending.silent_s:g} s; raise --timeout")
        if ending.exit_code != 0:
            raise RunFailed(_reason(folder, ending.exit_code))


def _compressors(texts: str | None) -> tuple[str, ...]:
    """Short spec texts, each once; the baseline first where all are asked for."""
    if texts is None:
        built = [_build(name) for name in registry.entries("compressors")]
        names = [spec.short_text(compressor) for compressor in built if not compressor.engine_hook]
        return tuple(sorted(names, key=lambda name: (name != BASELINE, name)))
    chosen = {spec.short_text(compressor): compressor for compressor in map(_build, spec.split_list(texts))}
    for name, compressor in chosen.items():
        if compressor.engine_hook:
            raise UsageError(
                f"{name} encodes inside PyTorch's own hook, out of sight; see what it costs with bench run"
            )
    return tuple(chosen)


def _build(text: str) -> Compressor:
    return cast(Compressor, spec.build("compressors", text))


def _device(device: Literal["auto", "cpu", "cuda"]) -> Literal["cpu", "cuda"]:
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise UsageError("torch sees no CUDA device on this machine; use --device cpu, or auto")
    return "cuda" if available and device != "cpu" else "cpu"


def _reason(folder: RunFolder, exit_code: int) -> str:
    report = read_json(folder.error_of(0))
    if report:
        return str(report["message"])
    if exit_code == -signal.SIGKILL:
        return "the measuring process was killed; the machine may have run out of memory"
    return f"the measuring process ended with exit code {exit_code}"
