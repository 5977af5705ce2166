"""Measurements: jobs in a temporary folder, which report to the command that started them."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.core import processes
from bench.core.config.job import JobConfig
from bench.core.errors import Interrupted, RunFailed
from bench.core.run_folder import RunFolder
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import ProgressReader, WatchdogTimeouts, explain, reports_of
from bench.launch.jobs.stale_jobs import noted

OnReport = Callable[[Mapping[str, Any]], None]


@processes.interruptible()
def measure(
    command: str,
    config: JobConfig,
    start: Callable[[RunFolder], torchrun.Started],
    timeouts: WatchdogTimeouts,
    on_report: OnReport,
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


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[RunFolder]:
    """Make a temporary folder for the job in the block, and remove it afterwards.

    Args:
        command: name of the command, part of the folder's name.

    Raises:
        RunFailed: the block raised it; the folder is kept, and its path is added to the message.
    """
    folder = RunFolder(Path(tempfile.mkdtemp(prefix=f"bench-{command}-")))
    with noted(command, folder.path):
        try:
            folder.errors.mkdir()
            folder.logs.mkdir()
            yield folder
        except RunFailed as error:
            raise RunFailed(f"{error}; logs are in {folder.path}") from None
        except BaseException:
            shutil.rmtree(folder.path)
            raise
        shutil.rmtree(folder.path)
