"""Start, watch and stop jobs; build torchrun's command lines.

If all ranks are on one machine, including ranks on virtual hosts, the command's fork server forks them. With several
machines, each machine runs a torchrun agent. No matter how a job ends (success, an error, Ctrl-C, a hang), no process
of the job is left: the fork server or agent gets a signal to stop, then all its remaining descendants are killed.
"""

import contextlib
import dataclasses
import math
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.core.config.run import RanksConfig
from bench.core.config.syntax import Endpoint
from bench.core.errors import RunFailed, UsageError
from bench.core.processes import die_with_parent, killed_by
from bench.core.run_folder import RunFolder, write_json
from bench.hosts.cluster import Cluster
from bench.hosts.network import INTERFACE
from bench.launch.jobs.failure import ProgressReader, WatchdogTimeouts
from bench.launch.jobs.fork_server import TRAIN, ForkedJob, ForkServer, end, job_variables

ASK_EVERY_S = 5.0
ANSWER_WITHIN_S = 2.0


@dataclasses.dataclass
class MachineZero:
    """Connects to machine 0 from time to time, to find out whether the job still runs there.

    Attributes:
        endpoint: HOST:PORT at which machine 0 listens as long as its torchrun agent runs.
    """

    endpoint: str
    _last_try: float = -ASK_EVERY_S

    def is_heard(self) -> bool:
        """Return True if machine 0 accepted a connection just now.

        If the last try was less than `ASK_EVERY_S` seconds ago, return False without another try.
        """
        now = time.monotonic()
        if now - self._last_try < ASK_EVERY_S:
            return False
        self._last_try = now
        zero = Endpoint.parse(self.endpoint)
        with contextlib.suppress(OSError):
            socket.create_connection((zero.host, zero.port), ANSWER_WITHIN_S).close()
            return True
        return False


POLL_S = 0.1
# Port of the rendezvous on virtual host 0; the network is private, so the port is always free.
_PORT = 29500
# A running job: a whole job on one machine, or this machine's part of a job on several machines.
Started = ForkedJob | subprocess.Popen[bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """The result of a job.

    Attributes:
        exit_code: exit code of the job; 1 if the job was stopped.
        silent_s: seconds without a report after which the job was stopped; None if the job ended by itself.
        was_heard: True if rank 0 reported at least once, or machine 0 accepted at least one connection.
    """

    exit_code: int
    silent_s: float | None = None
    was_heard: bool = True


def launch(config: RanksConfig, folder: RunFolder, server: ForkServer, module: str | None = None) -> Started:
    """Start a job's ranks, on this machine or on virtual hosts, and return the job.

    Links of virtual hosts are measured before the ranks start.

    Args:
        config: number and placement of the ranks.
        folder: the job's folder, in which the measurements of the links are saved.
        server: starts the ranks if all of them are on this machine.
        module: name of the module that every rank runs; None for the server's module.

    Raises:
        UsageError: this machine does not support virtual hosts, or does not support the configured links.
        RunFailed: the network of the virtual hosts could not be set up.
    """
    if config.nnodes > 1:
        return start(*agent(config, folder, module or server.module), folder.log)
    network = None
    if config.cluster is not None:
        network = server.network(Cluster.from_dict(config.cluster))
        network.restart(config.seed)
        write_json(folder.link, dataclasses.asdict(network.report))
        for warning in network.report.warnings:
            print(f"warning: {warning}", file=sys.stderr)
    return server.start(
        folder,
        num_ranks=config.world_size,
        threads=config.threads,
        device=config.device,
        network=network,
        module=module,
    )


def shell_lines(config: RanksConfig, folder: RunFolder) -> list[str]:
    """Return the shell commands that start this machine's ranks by hand: one command, or one per virtual host."""
    cluster = Cluster.from_dict(config.cluster) if config.cluster is not None else None
    agents = (
        [agent(config, folder, TRAIN)]
        if cluster is None
        else [agent_on_host(index, cluster, config.threads, folder, TRAIN) for index in range(len(cluster.hosts))]
    )
    return [shlex.join([*(f"{k}={value}" for k, value in needed.items()), *line]) for line, needed in agents]


def agent(config: RanksConfig, folder: RunFolder, module: str) -> tuple[list[str], dict[str, str]]:
    """Return the command line of this machine's torchrun agent, and the environment variables to add for it.

    Args:
        config: number and placement of the ranks.
        folder: the job's folder, which the module gets as its only argument.
        module: name of the module that every rank runs.
    """
    where = [f"--nnodes={config.nnodes}", f"--nproc-per-node={config.ranks_per_host}"]
    if config.nnodes == 1:
        # The rendezvous is static, because torchrun's other rendezvous reads pickles that any local user can write. It
        # has a free port, so that two runs on one machine do not connect to each other.
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where += ["--master-addr=127.0.0.1", f"--master-port={probe.getsockname()[1]}"]
    else:
        host, _, port = (config.rdzv_endpoint or "").rpartition(":")
        # A static rendezvous numbers ranks by machine, so machine 0 has rank 0 and writes the results.
        where += [f"--node-rank={config.node_rank}", f"--master-addr={host}", f"--master-port={port}"]
        # This timeout is longer than the launcher's, because the launcher's error message is clearer.
        where.append(f"--rdzv-conf=timeout={math.ceil(2 * WatchdogTimeouts.with_job(config).first_s)}")
    variables = job_variables(config.threads, is_local=config.nnodes == 1)
    return _command(where, folder.logs, module, folder), variables


def agent_on_host(
    index: int, cluster: Cluster, threads: int, folder: RunFolder, module: str
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of a virtual host's torchrun agent, and the environment variables to add for it.

    A machine of a real cluster would run the same command. The rendezvous is static, so host i holds ranks
    i x `ranks_per_host` and up.

    Args:
        index: number of the virtual host, from 0.
        cluster: all virtual hosts.
        threads: threads per rank.
        folder: the job's folder, which the module gets as its only argument.
        module: name of the module that every rank runs.
    """
    where = [
        f"--nnodes={len(cluster.hosts)}",
        f"--node-rank={index}",
        f"--nproc-per-node={cluster.ranks_per_host}",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={cluster.address(0)}:{_PORT}",
        f"--local-addr={cluster.address(index)}",
    ]
    # gloo would look up the machine's name, which is not an address of the private network.
    variables = job_variables(threads) | {"GLOO_SOCKET_IFNAME": INTERFACE}
    return _command(where, folder.logs / f"host-{index}", module, folder), variables


def _command(where: list[str], logs: Path, module: str, folder: RunFolder) -> list[str]:
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


def check_port(config: RanksConfig) -> None:
    """Check on machine 0 that the port of --rdzv-endpoint is free.

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
                f"port {port} of --rdzv-endpoint cannot be used ({error.strerror}); choose another port"
            ) from None


def start(arguments: list[str], extra_variables: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a new session and write its output to `log`.

    Linux kills the command when this process ends.
    """
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
    """Watch a job until it ends, and return how it ended. When the function ends, no process of the job is left.

    Args:
        job: the running job.
        progress: reads rank 0's reports.
        timeouts: how long the job may report nothing before it is stopped.
        on_progress: called with every report.
        machine_zero: given if rank 0 is on another machine; then each connection that machine 0 accepts counts as a
            report. None if rank 0 is on this machine.

    Raises:
        RunFailed: the process that the ranks are forked from, the supervisor of virtual hosts, or torchrun was killed.
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
                if exit_code < 0:
                    raise RunFailed(killed_by("torchrun on this machine", -exit_code))
                return Ending(exit_code=exit_code)
            limit_s = timeouts.next_s if was_heard else timeouts.first_s
            if time.monotonic() - heard > limit_s:
                return Ending(exit_code=1, silent_s=limit_s, was_heard=was_heard)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(POLL_S)
    finally:
        stop(job)


def stop(job: Started) -> None:
    """End a job and all its processes."""
    if isinstance(job, ForkedJob):
        job.close()
    else:
        end(job)
