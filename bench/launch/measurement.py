"""Run a measurement as a job in a temporary folder, for `bench collectives`, `compressors` and `calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.core import processes
from bench.core.config.job import JobConfig
from bench.core.errors import Interrupted, RunFailed
from bench.core.run_folder import RunFolder
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import ProgressReader, WatchdogTimeouts, explain, reports_of
from bench.launch.jobs.scratch import scratch_folder


@processes.interruptible()
def measure(
    command: str,
    config: JobConfig,
    start: Callable[[RunFolder], torchrun.Started],
    timeouts: WatchdogTimeouts,
    on_report: Callable[[Mapping[str, Any]], None],
) -> None:
    """Run the job; return when none of its processes is left.

    Args:
        command: name of the command, for the temporary folder.
        config: complete configuration.
        start: starts the job in its folder.
        timeouts: how long the job may report nothing.
        on_report: called with each report of rank 0.

    Raises:
        RunFailed: a process failed or hung; the message names the logs, which are kept.
        Interrupted: the user stopped it.
    """
    with scratch_folder(command) as folder:
        folder.config.write_text(config.to_json(), encoding="utf-8")
        try:
            ending = torchrun.watch(start(folder), ProgressReader(folder.progress), timeouts, on_report)
        except KeyboardInterrupt:
            raise Interrupted("stopped by the user") from None
        if ending.silent_s is not None and not reports_of(folder):
            raise RunFailed(f"no turn ended within {ending.silent_s:g} s; raise --timeout")
        if ending.exit_code != 0:
            raise RunFailed(explain(folder))
