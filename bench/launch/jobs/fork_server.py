"""ForkServer, which starts a process that imports torch, plans a command's runs, and forks the ranks of its jobs.

The launcher itself does not import torch. Importing torch takes longer than a small run, so the process is started
early. The process serves one command and ends when the command ends, even if the command is killed. Ranks on virtual
hosts are forked from the same process, and then enter the namespaces of their host. The network of the virtual hosts is
kept for the command's later jobs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import ParamSpec, TypeVar

import psutil
from typing_extensions import override

from bench.core import environment
from bench.core.config.run import DEFAULT_WORLD_SIZE, RanksConfig
from bench.core.environment import usable_cores
from bench.core.errors import RunFailed, UsageError
from bench.core.processes import import_variables
from bench.core.run_folder import RunFolder
from bench.core.server_process import ServerProcess
from bench.hosts.cluster import Cluster
from bench.hosts.virtual_network import VirtualNetwork
from bench.launch.jobs.failure import HOSTS_GRACE_S

# By default glibc returns large blocks to the kernel and gets new, zeroed pages in every step, which takes up to a
# tenth of a step's time on a CPU. These thresholds make glibc keep the blocks. Before version 2.35, glibc rejects a
# first threshold above 32 MiB. Setting only one threshold would be worse than setting none, because glibc then stops
# adapting the other threshold.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
# With all ranks on one machine, gloo need not be reachable from other machines.
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}


def job_variables(threads: int, *, is_local: bool = False) -> dict[str, str]:
    """Return a job's environment variables, to be added to those of this process.

    OMP_NUM_THREADS is one of them, because torchrun would otherwise set it to 1.

    Args:
        threads: threads per rank.
        is_local: True if all ranks of the job are on this machine.
    """
    defaults = KEEP_MEMORY | (LOOPBACK if is_local else {})
    return {
        **{name: os.environ.get(name, value) for name, value in defaults.items()},
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        **import_variables(),
    }


SERVER = "bench.rank.fork_server"
TRAIN = "bench.rank.worker"
NAME = "the process that the ranks are forked from"
GRACE_S = 3.0
P = ParamSpec("P")
T = TypeVar("T")


class ForkServer(contextlib.AbstractContextManager["ForkServer"]):
    """Starts the jobs of one command on this machine, one after the other, by forking processes that imported torch.

    Jobs whose ranks have the same number of threads are forked from the same process. There is at most one network of
    virtual hosts. As a context manager, the object ends the processes and the network at the end of the block.

    Args:
        module: name of the module that every rank runs.

    Raises:
        UsageError: the environment requests kernels that are not available, or /dev/shm cannot be written.
    """

    def __init__(self, module: str) -> None:
        environment.kernels()  # fails here, rather than in a rank, if the environment requests missing kernels
        try:
            multiprocessing.Lock()  # processes share locks in /dev/shm
        except (ImportError, OSError) as error:
            raise UsageError(
                f"processes cannot share locks, which need a writable /dev/shm ({error}); mount one: mount -t tmpfs "
                "tmpfs /dev/shm"
            ) from None
        self.module = module
        self._processes: dict[int, ServerProcess] = {}
        self._network: VirtualNetwork | None = None

    @override
    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, threads: int) -> None:
        """Start a process that imports torch, for jobs with this number of threads per rank."""
        if threads in self._processes:
            self._processes[threads].close()
        command = [sys.executable, "-m", SERVER, self.module]
        self._processes[threads] = ServerProcess(NAME, command, job_variables(threads, is_local=True))

    def warm_up_for(self, config: RanksConfig) -> None:
        """Start a process that imports torch for a job, unless one runs or this process has imported torch itself.

        A process for another number of threads, which was started for incomplete options, is killed. Nothing is done
        for a job on several machines, because its ranks are not forked.

        Args:
            config: the job's options; if the numbers of ranks and threads are missing, their defaults are assumed.
        """
        num_ranks = config.world_size or (config.hosts or 0) * (config.ranks_per_host or 1) or DEFAULT_WORLD_SIZE
        threads = config.threads or max(1, usable_cores() // num_ranks)
        if config.nnodes == 1 and "torch" not in sys.modules and threads not in self._processes:
            self.close()
            self.warm_up(threads)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in a process that has imported torch, and return the function's result.

        If no such process was started, the function is called in this process.

        Raises:
            Exception: the function raised this exception.
            RunFailed: the process ended before it answered.
        """
        if not self._processes:
            return function(*args, **kwargs)
        answer: T = next(iter(self._processes.values())).call((function, args, kwargs))
        return answer

    def network(self, cluster: Cluster) -> VirtualNetwork:
        """Return the running network of a cluster.

        If the previous job had the same cluster, its network is used again. Otherwise, the old network is
        closed, and a new one is built.

        Raises:
            UsageError: virtual hosts, or the settings of their links, are not possible here.
            RunFailed: the network could not be built.
        """
        if self._network is None or self._network.poll() is not None or self._network.cluster != cluster:
            self._close_network()
            self._network = VirtualNetwork(cluster)
        return self._network

    def start(
        self,
        folder: RunFolder,
        *,
        num_ranks: int,
        threads: int,
        device: str,
        network: VirtualNetwork | None = None,
        module: str | None = None,
    ) -> ForkedJob:
        """Start a job and return it; the previous job must have ended.

        Args:
            folder: the job's folder, which the module gets as its only argument.
            num_ranks: number of ranks, each of which is a process.
            threads: threads per rank.
            device: "cpu" or "cuda". CUDA cannot be used after a fork, so with "cuda" every rank imports torch itself.
            network: network of virtual hosts, each of which gets the same number of ranks; None: no virtual hosts.
            module: name of the module that every rank runs; None for the module that the constructor got.
        """
        if threads not in self._processes or self._processes[threads].poll() is not None:
            self.warm_up(threads)
        process = self._processes[threads]
        folder.rendezvous.mkdir(mode=0o700)
        hosts: list[tuple[tuple[Path, ...], dict[str, str]]] = [((), {})]
        if network is not None:
            hosts = [(network.namespaces(index), network.variables) for index in range(len(network.cluster.hosts))]
        process.send(
            {
                "module": module or self.module,
                "folder": RunFolder(folder.path.absolute()),
                "hosts": hosts,
                "ranks_per_host": num_ranks // len(hosts),
                "start_method": "fork" if device == "cpu" else "spawn",
                "grace_s": HOSTS_GRACE_S,
            }
        )
        return ForkedJob(process, folder, network)

    def close(self) -> None:
        """Kill the processes that ranks are forked from and close the network; no job may be running."""
        while self._processes:
            self._processes.popitem()[1].close()
        self._close_network()

    def _close_network(self) -> None:
        if self._network is not None:
            self._network.close()
        self._network = None


@dataclasses.dataclass
class ForkedJob:
    """A running job of forked ranks, with the methods `poll` and `wait` of `subprocess.Popen`.

    Attributes:
        server: the process that runs the job, and can run other jobs afterwards.
        folder: the job's folder.
        network: the network of the job's virtual hosts; None: the ranks are not on virtual hosts.
    """

    server: ServerProcess
    folder: RunFolder
    network: VirtualNetwork | None = None
    _exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the job's exit code, or None while the job runs.

        Raises:
            RunFailed: a process that the job needs was killed.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the job has ended; return its exit code, which is not 0 after a failure.

        Raises:
            RunFailed: a process that the job needs was killed.
            subprocess.TimeoutExpired: the job still runs after `timeout` seconds.
        """
        if self._exit_code is None:
            above = [self.server] if self.network is None else [self.server, self.network]
            heard = wait([process.connection for process in above], timeout)
            if not heard:
                raise subprocess.TimeoutExpired(self.server.args, timeout or 0)
            if self.network is not None and self.server.connection not in heard:  # the network has ended
                raise RunFailed(self.network.last_words())
            try:
                self._exit_code = int(self.server.receive())
            except EOFError:
                said = self.server.last_words()
                if (exit_code := self.server.wait()) < 0:
                    raise RunFailed(said) from None
                with contextlib.suppress(OSError), self.folder.log.open("a", encoding="utf-8") as log:  # a full disk
                    log.write(f"{said}\n")
                self._exit_code = exit_code or 1
        return self._exit_code

    def close(self) -> None:
        """End the job and all its ranks. After a failure, close the network too, because frames may still be in it."""
        with contextlib.suppress(RunFailed):
            self.poll()
        if self._exit_code is None:
            end(self.server)
        if self._exit_code != 0 and self.network is not None:
            self.network.close()
        shutil.rmtree(self.folder.rendezvous)


def end(above: subprocess.Popen[bytes]) -> None:
    """Stop a process with SIGTERM, or kill it if it has not ended after three seconds; then kill its descendants."""
    below = _descendants(above.pid)
    if above.poll() is None:
        above.send_signal(signal.SIGTERM)
        try:
            above.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            below += _descendants(above.pid)
            above.kill()
            above.wait()
    for process in below:
        if process.is_running():
            process.kill()
    psutil.wait_procs(below, timeout=GRACE_S)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return []
