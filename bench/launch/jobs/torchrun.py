"""The job of a run: who starts its ranks, torchrun's command line, and its life from start to end.

Ranks on one machine are forked from the command's fork server; on several machines or virtual hosts each has a torchrun
of its own. The job is over when that says so, and whatever happens (an error, Ctrl-C, a hang) nothing of it is
left: whoever started the ranks gets a signal to stop, then every process below this one that is still there is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench.core.config.endpoint import Endpoint
from bench.core.config.job import RanksConfig
from bench.core.errors import RunFailed, UsageError
from bench.core.processes import die_with_parent, killed_by
from bench.core.run_folder import RunFolder
from bench.hosts.cluster import Cluster
from bench.hosts.job import HostsJob, start_hosts, torchrun_arguments
from bench.launch.jobs.fork_server import TRAIN, ForkedJob, ForkServer
from bench.launch.jobs.machine_zero import MachineZero
from bench.launch.jobs.progress import ProgressReader
from bench.launch.jobs.variables import job_variables, local_variables
from bench.launch.jobs.watchdog import HOSTS_GRACE_S, WatchdogTimeouts

POLL_S = 0.1
GRACE_S = 3.0
Started = ForkedJob | subprocess.Popen[bytes] | HostsJob
"""A job under way: all of it on this machine, this machine's part of it, or on virtual hosts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How the job ended.

    Attributes:
        exit_code: torchrun's; 1 where the job was stopped.
        silent_s: it was stopped because nothing was heard of it for so many seconds; None: it ended by itself.
        was_heard: there was a report, or an answer of machine 0.
    """

    exit_code: int
    silent_s: float | None = None
    was_heard: bool = True


def launch(config: RanksConfig, folder: RunFolder, server: ForkServer) -> Started:
    """Start the job where its configuration says: on this machine, or on virtual hosts whose links are measured first.

    Args:
        config: how many ranks where.
        folder: the job's folder.
        server: starts the ranks where all of them are on this machine; names what every rank runs.

    Raises:
        UsageError: virtual hosts, or what was asked of their links, are not possible here.
        RunFailed: the network could not be set up.
    """
    if config.cluster is not None:
        job = start_on_hosts(config, Cluster.from_dict(config.cluster), folder, server.module)
        try:
            for warning in job.network.warnings:
                print(f"warning: {warning}", file=sys.stderr)
        except BaseException:  # whoever read that has gone, or stopped it
            job.close()
            raise
        return job
    if config.nnodes > 1:
        return start(command(config, folder, server.module), job_variables(config.threads), folder.log)
    return server.start(folder, num_ranks=config.world_size, threads=config.threads, device=config.device)


def command(config: RanksConfig, folder: RunFolder, module: str = TRAIN) -> list[str]:
    """The exact torchrun line of this machine.

    Args:
        config: how many ranks where.
        folder: the job's folder, the module's only argument.
        module: what every rank runs.
    """
    where = [f"--nnodes={config.nnodes}", f"--nproc-per-node={config.ranks_per_host}", *_rendezvous(config)]
    return _line(where, folder.logs, module, folder)


def command_on_host(index: int, cluster: Cluster, folder: RunFolder, module: str = TRAIN) -> list[str]:
    """The exact torchrun line of one virtual host: the one that a machine of a real cluster gets."""
    where, _ = torchrun_arguments(index, cluster)
    return _line(where, folder.logs / f"host-{index}", module, folder)


def _line(where: list[str], logs: Path, module: str, folder: RunFolder) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *where,
        "--max-restarts=0",
        "--redirects=3",
        f"--log-dir={logs}",
        "-m",
        module,
        str(folder.path.absolute()),
    ]


def shell_lines(config: RanksConfig, folder: RunFolder) -> list[str]:
    """What a user would type to start the job by hand: one line, or one per virtual host."""
    if config.cluster is None:
        return [_shell_line(local_variables(config.threads), command(config, folder))]
    hosts = Cluster.from_dict(config.cluster)
    return [
        _shell_line(
            job_variables(config.threads) | torchrun_arguments(index, hosts)[1], command_on_host(index, hosts, folder)
        )
        for index in range(len(hosts.hosts))
    ]


def _shell_line(needed: dict[str, str], line: list[str]) -> str:
    return shlex.join([*(f"{key}={value}" for key, value in needed.items()), *line])


def start_on_hosts(config: RanksConfig, cluster: Cluster, folder: RunFolder, module: str = TRAIN) -> HostsJob:
    """Build the cluster's network, measure it, and start one torchrun agent per host.

    Raises:
        UsageError: virtual hosts, or what was asked of their links, are not possible here.
        RunFailed: the network could not be set up.
    """

    def command_for(index: int) -> tuple[list[str], dict[str, str]]:
        _, needed = torchrun_arguments(index, cluster)
        return command_on_host(index, cluster, folder, module), job_variables(config.threads) | needed

    with folder.log.open("wb") as output:
        return start_hosts(cluster, folder.path, command_for, output=output, grace_s=HOSTS_GRACE_S, seed=config.seed)


def check_port(config: RanksConfig) -> None:
    """Machine 0 must be able to listen where the others will look for it.

    Raises:
        UsageError: the port is taken.
    """
    if config.rdzv_endpoint is None or config.node_rank != 0:
        return
    port = Endpoint.parse(config.rdzv_endpoint).port
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise UsageError(
                f"port {port} of --rdzv-endpoint cannot be used ({error.strerror}); choose another one"
            ) from None


def start(arguments: list[str], extra_variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a job in a session of its own, its output in `log`; Linux kills it when this process dies."""
    with log.open("wb") as output:
        return subprocess.Popen(
            arguments,
            env=os.environ | extra_variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def watch(
    job: Started,
    progress: ProgressReader,
    timeouts: WatchdogTimeouts,
    on_progress: Callable[[dict[str, Any]], None],
    machine_zero: MachineZero | None = None,
) -> Ending:
    """See the job to its end; nothing of it is left when this returns or raises.

    Args:
        job: as `start` returned it.
        progress: what rank 0 reports.
        timeouts: how long nothing may be heard before the job is stopped.
        on_progress: called with every report.
        machine_zero: heard of in place of rank 0's reports, where rank 0 is elsewhere.

    Raises:
        RunFailed: a process above the ranks was killed.
    """
    heard = time.monotonic()
    was_heard = False
    try:
        while True:
            exit_code = job.poll()
            lines = progress.new_lines()
            for line in lines:
                on_progress(line)
            if lines or (machine_zero is not None and machine_zero.is_heard()):
                heard, was_heard = time.monotonic(), True
            if exit_code is not None:
                if death := _death(job, exit_code):
                    raise RunFailed(death)
                return Ending(exit_code=exit_code)
            limit_s = timeouts.next_s if was_heard else timeouts.first_s
            if time.monotonic() - heard > limit_s:
                return Ending(exit_code=1, silent_s=limit_s, was_heard=was_heard)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(POLL_S)
    finally:
        stop(job)


def _death(job: Started, exit_code: int) -> str | None:
    """Say which process above the ranks was killed by which signal; None if none was."""
    if isinstance(job, HostsJob):
        return job.death()
    who = "the process that the ranks are forked from" if isinstance(job, ForkedJob) else "torchrun on this machine"
    return killed_by(who, -exit_code) if exit_code < 0 else None


def stop(job: Started) -> None:
    """End the job and every process below it."""
    if isinstance(job, HostsJob):
        job.close()  # its processes live in a namespace that ends with it
        return
    if isinstance(job, ForkedJob):
        if job.poll() is None:  # else its server has seen to all ranks, and may serve another job
            _end(job.server)
        job.tidy_up()
    else:
        _end(job)


def _end(above: subprocess.Popen[bytes]) -> None:
    """End a process and all below it."""
    below = _descendants(above.pid)
    if above.poll() is None:
        above.send_signal(signal.SIGTERM)
        try:
            above.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            below = [*below, *_descendants(above.pid)]
            above.kill()
            above.wait()
    for process in below:
        if process.is_running():
            process.kill()
    psutil.wait_procs(below, timeout=GRACE_S)


def _rendezvous(config: RanksConfig) -> list[str]:
    if config.nnodes == 1:
        # Static, for torchrun's other rendezvous reads pickles that anybody can write; a free port of the moment, so
        # that two runs on one machine do not meet.
        return ["--master-addr=127.0.0.1", f"--master-port={_free_port()}"]
    host, _, port = (config.rdzv_endpoint or "").rpartition(":")
    # A static rendezvous keeps rank = machine, so machine 0 holds rank 0 and writes the results.
    return [
        f"--node-rank={config.node_rank}",
        f"--master-addr={host}",
        f"--master-port={port}",
        # The launcher gives up first, in words that a user can read.
        f"--rdzv-conf=timeout={math.ceil(2 * WatchdogTimeouts.with_job(config).first_s)}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
