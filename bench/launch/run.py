"""Execute or resume one run: make the run's folder, start and watch its job, and record how the run ended.

`measure` does the same for the jobs of commands that measure something, in a temporary folder.
"""

import contextlib
import dataclasses
import itertools
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from bench.core import environment, processes
from bench.core.checkpoints import Checkpoints
from bench.core.config.run import JobConfig, RunConfig
from bench.core.errors import Interrupted, RunFailed, UsageError
from bench.core.files import locked
from bench.core.rows import StoreError
from bench.core.run_folder import RunFolder, read_json, write_json
from bench.launch.jobs import torchrun
from bench.launch.jobs.failure import (
    ProgressReader,
    WatchdogTimeouts,
    explain,
    is_disk_full,
    noted,
    record_ending,
    reports_of,
)
from bench.launch.jobs.fork_server import ForkServer
from bench.launch.jobs.torchrun import MachineZero
from bench.launch.without_torch import result_or_refusal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a run.

    Attributes:
        status: "ok", "failed", "timeout" or "interrupted".
        error: reason of the failure in one sentence; empty if `status` is "ok".
        folder: the run's folder.
        summary: content of `status.json`.
    """

    status: str
    error: str
    folder: RunFolder
    summary: dict[str, Any]


@processes.interruptible()
def resume(
    folder: RunFolder,
    on_progress: Callable[[dict[str, Any]], None],
    server: ForkServer,
    config: RunConfig | None = None,
    residuals: Literal["sum", "drop"] | None = None,
) -> Result:
    """Resume a run from its last checkpoint; return its result when the run has ended, successfully or not.

    Args:
        folder: the run's folder; `configuration_of` has checked that the run can be resumed.
        on_progress: called with every report of rank 0.
        server: starts the ranks; made with `fork_server.TRAIN`.
        config: configuration to resume with. Its timeout may differ from the old one. Its number of ranks may differ if
            it comes from `plan.with_ranks`. None keeps the old configuration.
        residuals: what happens to the gradient residuals that the old ranks have not sent: "sum" gives every
            new rank their mean, so that the mean over ranks stays the same; "drop" discards them. None if the number
            of ranks does not change.

    Raises:
        UsageError: the run cannot be resumed, or another command is executing the run.
    """
    with locked(folder.path) as is_held:
        _check_held(folder, is_held)
        stored = configuration_of(folder)
        config = config or stored
        torchrun.check_port(config)
        if residuals is not None:
            change_ranks(folder, config, residuals)
        elif config != stored:
            write_json(folder.config, dataclasses.asdict(config))
        with noted("run", folder.path):
            prepare_folder(folder)
            return _watched(config, folder, on_progress, server)


@processes.interruptible()
def execute(config: RunConfig, out: Path, on_progress: Callable[[dict[str, Any]], None], server: ForkServer) -> Result:
    """Execute a run; return its result when the run and all its processes have ended, successfully or not.

    Args:
        config: complete configuration, as `plan.plan` returns it.
        out: folder in which the run's folder is made.
        on_progress: called with every report of rank 0.
        server: starts the ranks; made with `fork_server.TRAIN`.

    Raises:
        UsageError: `out` cannot be written, the port of --rdzv-endpoint is taken, or this machine does not support the
            virtual hosts.
    """
    torchrun.check_port(config)
    folder = RunFolder.create(out, config.name, config.digest, config.seed)
    with noted("run", folder.path), locked(folder.path):
        return _watched(config, folder, on_progress, server)


def _watched(
    config: RunConfig, folder: RunFolder, on_progress: Callable[[dict[str, Any]], None], server: ForkServer
) -> Result:
    """Execute the run's job; if the job lost a process, restart the job up to `config.max_restarts` times."""
    result, was_lost = _execute(config, folder, on_progress, server)
    for attempt in range(1, config.max_restarts + 1):
        if not was_lost:
            break
        print(f"note: {result.error}; restart {attempt} of {config.max_restarts}", file=sys.stderr)
        prepare_folder(folder)
        result, was_lost = _execute(config, folder, on_progress, server)
    return result


def _execute(
    config: RunConfig, folder: RunFolder, on_progress: Callable[[dict[str, Any]], None], server: ForkServer
) -> tuple[Result, bool]:
    """Start and watch the run's job; return (result, True if the job failed because a process was lost)."""
    machine_zero = MachineZero(config.rdzv_endpoint) if config.rdzv_endpoint and config.node_rank > 0 else None
    started = time.time()
    job: torchrun.Started | None = None
    try:
        job = _launch(config, folder, server)
        timeouts = WatchdogTimeouts.with_job(config)
        ending = torchrun.watch(job, ProgressReader(folder.progress), timeouts, on_progress, machine_zero)
    except KeyboardInterrupt:
        server.close()  # also ends ranks that are not watched yet
        return _failed(config, folder, started, "interrupted", "stopped by the user; the rows so far are kept"), False
    except RunFailed as failure:
        return _failed(config, folder, started, "failed", str(failure)), job is not None or folder.resume.exists()
    except BaseException as error:
        if job is not None and read_json(folder.status) is None:  # for example, because the reader of stdout ended
            reason = f"bench itself ended with {type(error).__name__}; the rows so far are kept"
            _failed(config, folder, started, "interrupted", reason)
        raise
    summary = read_json(folder.status)  # rank 0 writes the file at the end, before the ranks disconnect
    if summary is None and ending.silent_s is not None and not reports_of(folder):
        return _failed(config, folder, started, "timeout", _silence(config, ending)), True
    if summary is None and ending.exit_code != 0:
        was_lost = not is_disk_full(folder) and all(report["lost_a_peer"] for report in reports_of(folder))
        names = dict(enumerate(config.rank_names))
        reason = re.sub(r"\brank (\d+)\b", lambda found: names.get(int(found[1]), found[0]), explain(folder))
        return _failed(config, folder, started, "failed", reason), was_lost
    if summary is None:  # rank 0 ran on another machine
        summary = {"status": "ok", "error": "", "run_id": folder.run_id}
        write_json(folder.status, summary)
    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # no longer needed
    return Result(status="ok", error="", folder=folder, summary=summary), False


def _silence(config: RunConfig, ending: torchrun.Ending) -> str:
    within = f"within {ending.silent_s:g} s"
    if config.nnodes > 1 and not ending.was_heard:
        return (
            f"the {config.nnodes} machines did not meet at {config.rdzv_endpoint} {within}; start the same command on "
            "each of them, or raise --timeout"
        )
    if config.node_rank > 0:
        return f"machine 0 has not answered for {ending.silent_s:g} s, and a rank here did not end by itself"
    return f"no step ended {within}; raise --timeout if the link is that slow"


def _launch(config: RunConfig, folder: RunFolder, server: ForkServer) -> torchrun.Started:
    """Start the run's job.

    If the start fails, remove the folder of a new run, or record that a resumed run was interrupted.
    """
    is_new = not folder.resume.exists()
    try:
        if is_new:
            write_json(folder.config, dataclasses.asdict(config))
            write_json(folder.environment, environment.describe(sys.argv, config.device))
        return torchrun.launch(config, folder, server)
    except (UsageError, OSError) as refusal:
        if is_new:
            shutil.rmtree(folder.path)
        else:
            with contextlib.suppress(OSError, StoreError):  # `refusal` is raised instead
                record_ending(config, folder, "interrupted", str(refusal))
        raise


def _failed(config: RunConfig, folder: RunFolder, started: float, status: str, error: str) -> Result:
    try:
        summary = record_ending(config, folder, status, error, time.time() - started)
    except (OSError, StoreError):
        summary = {"status": status, "error": f"{error} (this last row could not be written)", "run_id": folder.run_id}
    return Result(status=status, error=summary["error"], folder=folder, summary=summary)


# Resuming.


def check_left(folder: RunFolder) -> None:
    """Check that no other command is executing the run in this folder.

    Raises:
        UsageError: another command is executing the run.
    """
    if folder.path.is_dir():
        with locked(folder.path) as is_held:
            _check_held(folder, is_held)


def configuration_of(folder: RunFolder) -> RunConfig:
    """Return the configuration of a run, after checking that the run can be resumed from its last checkpoint.

    Raises:
        UsageError: the run cannot be resumed; the message says why, and what to do.
    """
    path = folder.path
    if not folder.config.is_file():
        raise UsageError(f"{path} is not a run folder (it holds no config.json); give one below results/runs")
    if (read_json(folder.status) or {}).get("status") == "ok":
        raise UsageError(f"{path} is complete, so there is nothing to resume; start a new run with bench run")
    try:
        config = RunConfig.from_json(folder.config)
    except UsageError as error:
        raise UsageError(f"{error}; resume with the version that started the run, or start it again") from None
    checkpoints = Checkpoints(folder)
    if not (steps := checkpoints.steps()):
        option = "" if config.checkpoint_every else " with --checkpoint-every"
        raise UsageError(f"{path} holds no checkpoint; start the run again{option}")
    checkpoints.check(steps[0], config)
    return config


def change_ranks(folder: RunFolder, config: RunConfig, waiting: str) -> None:
    """Store the configuration with which a run resumes on another number of ranks; keep a copy of the old one.

    Args:
        folder: the run's folder.
        config: the new configuration, as `plan.with_ranks` returns it.
        waiting: what happens to the gradient residuals that the old ranks have not sent: "sum" gives every
            new rank their mean, so that the mean over ranks stays the same; "drop" discards them.
    """
    checkpoints = Checkpoints(folder)
    manifest = checkpoints.manifest(checkpoints.steps()[0])
    resumed = read_json(folder.resume) or {"resumes": 0}
    write_json(folder.resume, resumed | {"waiting": waiting, "digest_before": manifest.digest})
    shutil.copyfile(folder.config, folder.config.with_name(f"config-before-{resumed['resumes'] + 1}.json"))
    write_json(folder.config, dataclasses.asdict(config))


def obstacle_to_resuming(folder: RunFolder) -> str | None:
    """Return a sentence that says why a run cannot be resumed; None if the run can be resumed."""
    outcome = result_or_refusal(configuration_of, folder)
    return str(outcome) if isinstance(outcome, UsageError) else None


def last_step(folder: RunFolder) -> int | None:
    """Return the number of optimizer steps after which a run can be resumed; None if the run cannot be resumed."""
    return None if obstacle_to_resuming(folder) else Checkpoints(folder).steps()[0]


def prepare_folder(folder: RunFolder) -> None:
    """Clear a run's folder for its next job, keep the logs of the old job, and count one more resume.

    All processes of the old job must have ended.
    """
    resumed = read_json(folder.resume) or {"resumes": 0}
    attempt = resumed["resumes"] + 1
    write_json(folder.resume, resumed | {"resumes": attempt})
    for path in (folder.status, folder.progress):
        path.unlink(missing_ok=True)
    for left in (folder.errors, folder.rendezvous):
        shutil.rmtree(left, ignore_errors=True)
    folder.errors.mkdir()
    if folder.logs.exists():  # keep the old job's logs, under the first free number
        names = (folder.path / f"logs-before-{number}" for number in itertools.count(attempt))
        folder.logs.replace(next(name for name in names if not name.exists()))
    folder.logs.mkdir()


def _check_held(folder: RunFolder, is_held: bool) -> None:
    if not is_held:
        raise UsageError(f"the run in {folder.path} is still running; wait until it ends")


# Measurements: jobs in a temporary folder, which report to the command that started them.

OnReport = Callable[[Mapping[str, Any]], None]


@processes.interruptible()
def measure(
    command: str,
    config: JobConfig,
    start: Callable[[RunFolder], torchrun.Started],
    timeouts: WatchdogTimeouts,
    on_report: OnReport,
) -> None:
    """Run a job that measures something, in a temporary folder; return when all processes of the job have ended.

    Args:
        command: name of the command that measures, which becomes part of the temporary folder's name.
        config: the job's complete configuration, which the ranks read from the folder.
        start: starts the job in its folder.
        timeouts: how long the job may report nothing before it is stopped.
        on_report: called with each report of rank 0.

    Raises:
        RunFailed: a process failed or hung; the message names the logs, which are kept.
        Interrupted: the user stopped the job.
    """
    with scratch_folder(command) as folder:
        write_json(folder.config, dataclasses.asdict(config))
        try:
            ending = torchrun.watch(start(folder), ProgressReader(folder.progress), timeouts, on_report)
        except KeyboardInterrupt:
            raise Interrupted("stopped by the user") from None
        if ending.silent_s is not None and not reports_of(folder):
            raise RunFailed(f"the job reported no result for {ending.silent_s:g} s; raise --timeout")
        if ending.exit_code != 0:
            raise RunFailed(explain(folder))


@contextlib.contextmanager
def scratch_folder(command: str) -> Iterator[RunFolder]:
    """Make a temporary folder for a job that the block runs, and remove the folder afterwards.

    Args:
        command: name of the command, part of the folder's name.

    Raises:
        RunFailed: the block raised this error; the folder is kept, and the folder's path is added to the message.
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
