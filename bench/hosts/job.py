"""Jobs on virtual hosts: run one command on each of several hosts on this machine, connected by rate-limited links.

The job runs in private namespaces (user, network, mount, process) under one supervisor. It needs no privileges, changes
nothing outside, and leaves nothing behind, whatever ends it: the supervisor is process 1 of the process namespace, so
the kernel kills the rest with it, and it ends itself when the pipe from the launcher closes, even after a SIGKILL of
the launcher.
"""

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import psutil
import pydantic

from bench.core import processes
from bench.core.counters import WIRE_HEADERS_VARIABLE
from bench.core.errors import RunFailed, UsageError
from bench.core.processes import STOP_GRACE_S, import_variables, killed_by
from bench.core.run_folder import RunFolder, read_json
from bench.hosts import support
from bench.hosts.cluster import Cluster
from bench.hosts.link_report import NetworkReport
from bench.hosts.network import INTERFACE
from bench.hosts.supervisor import Instructions
from bench.hosts.support import UNSHARE, search_path

# Port of the rendezvous on host 0; the network is private, so the port is always free.
_PORT = 29500
_READY_WITHIN_S = 600.0
_KILL_GRACE_S = 2.0

CommandFor = Callable[[int], tuple[Sequence[str], Mapping[str, str]]]


class HostsJob(contextlib.AbstractContextManager["HostsJob"]):
    """A running job with one command per host, used like `subprocess.Popen`; it ends when all commands have ended.

    The job ends with the process that created this object. Its exit code is that of the first command that failed.

    Args:
        unshare: the `unshare` process, which created the job's namespaces; it ends after all processes of the job.
        status: pipe from which the supervisor's messages are read, one JSON object per line.
        cluster: the hosts and their links.

    Attributes:
        cluster: the hosts and their links.
        network: the measurements of the links; set by `start_hosts` when the job is ready.
        poll, wait: the methods `poll` and `wait` of `unshare`, a `subprocess.Popen`.
    """

    network: NetworkReport

    def __init__(self, unshare: subprocess.Popen[bytes], status: IO[bytes], cluster: Cluster) -> None:
        self._unshare = unshare
        self._status = status
        self.cluster = cluster
        self.poll = unshare.poll
        self.wait = unshare.wait

    def terminate(self) -> None:
        """Send SIGTERM to every host's command; the supervisor kills those that have not ended after 5 s."""
        orders = self._unshare.stdin
        if self.poll() is None and orders is not None and not orders.closed:
            with contextlib.suppress(BrokenPipeError):  # the job has ended
                orders.write(b"stop\n")

    def kill(self) -> None:
        """Kill all processes of the job by closing the supervisor's input; after 2 s, kill the supervisor itself."""
        if self._unshare.stdin is not None:
            self._unshare.stdin.close()
        try:
            self.wait(_KILL_GRACE_S)
        except subprocess.TimeoutExpired:
            for process in (*psutil.Process(self._unshare.pid).children(), self._unshare):
                process.kill()

    def death(self) -> str | None:
        """Return a sentence that says by which signal `unshare` or the supervisor was killed.

        None if neither was killed, or if the job still runs.
        """
        if not self.poll():
            return None
        self.kill()
        return self._death(self._message(_KILL_GRACE_S))

    def close(self) -> None:
        """Stop the job with SIGTERM, kill what has not ended in time, and wait until all processes have ended."""
        if self.poll() is None:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(STOP_GRACE_S + 1)
        self.kill()
        self.wait()
        self._status.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait until the supervisor has built the network and measured the links.

        Raises:
            RunFailed: the supervisor failed, was killed, or was not ready within ten minutes.
            UsageError: the supervisor found that this machine cannot run the cluster.
        """
        if not self._message(_READY_WITHIN_S):
            raise RunFailed("the virtual hosts could not be started; the job's output says why")
        message = self._message(_READY_WITHIN_S)
        if message is None:
            raise RunFailed(f"the virtual hosts were not ready within {_READY_WITHIN_S:g} s; use fewer of them")
        if death := self._death(message):
            raise RunFailed(death)
        if "error" in message:
            kind = UsageError if message["exit_code"] == UsageError.exit_code else RunFailed
            raise kind(message["error"])
        if "ready" not in message:
            raise RunFailed("the virtual hosts could not be set up; the job's output says why")

    def _message(self, within_s: float) -> dict[str, Any] | None:
        """Return the supervisor's next message; {} if the supervisor has ended, None if no message comes in time."""
        readable, _, _ = select.select([self._status], [], [], within_s)
        return json.loads(self._status.readline() or b"{}") if readable else None

    def _death(self, last_message: dict[str, Any] | None) -> str | None:
        if last_message and "alone" not in last_message:
            return None
        exit_code = self.wait()
        who = "unshare" if last_message else "the supervisor of the virtual hosts"
        # `unshare` repeats the signal that ended the supervisor; some versions fail over SIGKILL.
        return killed_by(who, -exit_code if exit_code < 0 else signal.SIGKILL)


def start_hosts(
    cluster: Cluster,
    run_dir: Path,
    command_for: CommandFor,
    *,
    output: IO[Any] | None = None,
    grace_s: float = 30.0,
    seed: int = 1,
) -> HostsJob:
    """Build the network, measure it and start one command per host; return the job when the links have been measured.

    Args:
        cluster: the hosts and their links.
        run_dir: an existing folder; gets `hosts.json` (the supervisor's instructions) and `link.json` (measurements).
        command_for: returns (arguments, variables to add to this process's environment) for a host's index.
        output: file for the output and error output of all processes; None: that of this process.
        grace_s: number of seconds for which the other commands may continue after the first one failed.
        seed: seed of the losses and jitter that the forwarder makes.

    Raises:
        UsageError: virtual hosts, or the settings of their links, are not possible here.
        RunFailed: the network could not be set up, or a host cannot reach another.
    """
    for what, needed in (
        ("the run's folder", run_dir),
        ("the Python interpreter", Path(sys.executable)),
        ("bench", Path(__file__)),
    ):
        if any(each.is_relative_to("/run") for each in (needed.absolute(), needed.resolve())):
            raise UsageError(f"{what} is {needed}, and /run is hidden from virtual hosts; use another place")
    cluster = support.check_and_choose_backend(cluster)
    commands = [command_for(index) for index in range(len(cluster.hosts))]
    instructions = Instructions(
        cluster=cluster,
        commands=tuple(tuple(map(str, arguments)) for arguments, _ in commands),
        environments=tuple({WIRE_HEADERS_VARIABLE: cluster.wire_headers, **variables} for _, variables in commands),
        run_dir=run_dir.resolve(),
        grace_s=grace_s,
        seed=seed,
    )
    path = run_dir.resolve() / "hosts.json"
    path.write_bytes(pydantic.TypeAdapter(Instructions).dump_json(instructions, indent=2))
    status_out, status_in = os.pipe()
    with contextlib.ExitStack() as undo:
        status = undo.enter_context(os.fdopen(status_out, "rb", buffering=0))
        with os.fdopen(status_in, "wb"):  # the supervisor keeps its own copy
            unshare = subprocess.Popen(
                [
                    *(*UNSHARE, "--kill-child=SIGUSR1"),
                    *(sys.executable, "-m", "bench.hosts.supervisor", str(path), str(status_in)),
                ],
                env=os.environ | import_variables() | {"PATH": search_path()},
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                pass_fds=(status_in,),
                start_new_session=True,  # Ctrl-C reaches only the launcher, which then stops the job in order
            )
        job = HostsJob(unshare, status, cluster)
        undo.callback(job.wait)
        undo.callback(job.kill)
        job.wait_until_ready()
        report = read_json(RunFolder(run_dir).link)
        if report is None:
            raise RunFailed(f"the measurements of the virtual hosts are missing in {run_dir}; run it again")
        job.network = pydantic.TypeAdapter(NetworkReport).validate_python(report)
        undo.pop_all()
    return job


def torchrun_arguments(host_index: int, cluster: Cluster) -> tuple[list[str], dict[str, str]]:
    """Return (arguments, environment variables) with which torchrun on one virtual host finds the other hosts.

    The rendezvous is static, so host i holds ranks i x `ranks_per_host` and up. torchrun's `c10d` rendezvous would
    compare host names, which are the same on all virtual hosts, and assign ranks in the order of arrival.
    """
    arguments = [
        f"--nnodes={len(cluster.hosts)}",
        f"--node-rank={host_index}",
        f"--nproc-per-node={cluster.ranks_per_host}",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={cluster.address(0)}:{_PORT}",
        f"--local-addr={cluster.address(host_index)}",
    ]
    # gloo would look up the machine's name, which is not an address of the private network.
    return arguments, {"GLOO_SOCKET_IFNAME": INTERFACE}


def forwarded_bps() -> float:
    """Measure how much the forwarder can carry between two hosts without rate limits; takes two seconds.

    Return the sum of both directions in bits per second, including headers.

    Raises:
        UsageError: virtual hosts or the forwarder do not work here.
        RunFailed: the virtual hosts could not be set up.
    """
    cluster = dataclasses.replace(Cluster.uniform(2), forwarded=True)
    with processes.interruptible(), tempfile.TemporaryDirectory() as folder:
        with start_hosts(cluster, Path(folder), lambda index: (["true"], {})) as job:
            job.wait()
        return sum(flow.long_bps for flow in job.network.flows)
