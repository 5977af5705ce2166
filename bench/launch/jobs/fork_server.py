"""ForkServer, which starts a process that imports torch, to resolve a command's options and to fork its jobs' ranks.

The launcher itself does not import torch. Importing torch takes longer than a small run, so the process is started
early. It serves one command and ends with it, even if the command is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from typing_extensions import override

from bench.core import environment
from bench.core.config.run import DEFAULT_WORLD_SIZE, RanksConfig
from bench.core.environment import usable_cores
from bench.core.errors import RunFailed, UsageError
from bench.core.processes import die_with_parent, import_variables
from bench.core.run_folder import RunFolder

# By default glibc returns large blocks to the kernel and gets new, zeroed pages in every step, which takes up to a
# tenth of a step's time on a CPU. These thresholds make it keep the blocks. Before version 2.35, glibc rejects a first
# threshold above 32 MiB; setting only one of the two would be worse than setting neither, because glibc then stops
# adapting the other.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}
# With all ranks on one machine, gloo need not be reachable from others.
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


SERVER = "bench.train.fork_server"
TRAIN = "bench.train.worker"
STDERR = 2
P = ParamSpec("P")
T = TypeVar("T")
# Raised when reading from a process that has ended; the second if it left a request unread.
ENDED = (EOFError, ConnectionResetError)


class ForkServer(contextlib.AbstractContextManager["ForkServer"]):
    """Starts the jobs of one command on this machine, one after the other, by forking processes that imported torch.

    Jobs whose ranks have the same number of threads are forked from the same process. As a context manager, the object
    kills these processes at the end of the block.

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

    @override
    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, threads: int) -> None:
        """Start a process that imports torch, for jobs with this number of threads per rank."""
        if threads in self._processes:
            self._processes[threads].close()
        self._processes[threads] = ServerProcess(self.module, threads)

    def warm_up_for(self, config: RanksConfig) -> None:
        """Start a process that imports torch for a job, unless there is one or this process has imported torch itself.

        A process for another number of threads, which was started for incomplete options, is killed. Nothing is done
        for a job on virtual hosts or several machines, because its ranks are not forked.

        Args:
            config: the job's options; if the numbers of ranks and threads are missing, their defaults are assumed.
        """
        is_forked = config.nnodes == 1 and config.cluster is None and config.cluster_file is None
        threads = config.threads or max(1, usable_cores() // (config.world_size or DEFAULT_WORLD_SIZE))
        if is_forked and "torch" not in sys.modules and threads not in self._processes:
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
        process = next(iter(self._processes.values()))
        process.send((function, args, kwargs))
        try:
            answer: T | Exception = process.connection.recv()
        except ENDED:
            raise RunFailed(
                f"the job could not be planned: {process.last_words()}{environment.possible_causes()}"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def start(self, folder: RunFolder, *, num_ranks: int, threads: int, device: str) -> ForkedJob:
        """Start a job and return it; the previous job must have ended.

        Args:
            folder: the job's folder, which the module gets as its only argument.
            num_ranks: number of ranks, each of which is a process.
            threads: threads per rank.
            device: "cpu" or "cuda". CUDA cannot be used after a fork, so with "cuda" every rank imports torch itself.
        """
        if threads not in self._processes or self._processes[threads].poll() is not None:
            self.warm_up(threads)
        process = self._processes[threads]
        folder.rendezvous.mkdir(mode=0o700)
        process.send(
            {
                "folder": RunFolder(folder.path.absolute()),
                "num_ranks": num_ranks,
                "start_method": "fork" if device == "cpu" else "spawn",
            }
        )
        return ForkedJob(process, folder)

    def close(self) -> None:
        """Kill the processes that ranks are forked from; no job may be running."""
        while self._processes:
            self._processes.popitem()[1].close()


class ServerProcess(subprocess.Popen[bytes]):
    """A process that imports torch and that ranks are forked from.

    Args:
        module: name of the module that every rank runs.
        threads: threads per rank.

    Attributes:
        connection: pipe for requests; the process sends one answer to each request.
    """

    def __init__(self, module: str, threads: int) -> None:
        self.connection, far_end = multiprocessing.Pipe()
        with far_end:
            super().__init__(
                [sys.executable, "-m", SERVER, module, str(far_end.fileno())],
                pass_fds=[far_end.fileno()],
                env=os.environ | job_variables(threads, is_local=True),
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # visible to the user until a job has its log
                start_new_session=True,  # so Ctrl-C reaches only the launcher, which then stops the job
                preexec_fn=die_with_parent,
            )

    def send(self, request: object) -> None:
        """Send a request; if the process has ended, do nothing, and reading the answer will fail."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(request)

    def last_words(self) -> str:
        """Wait until the process has ended; return a sentence with the signal that killed it, or its exit code."""
        exit_code = self.wait()
        end = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
        return f"the process that the ranks are forked from {end}"

    def close(self) -> None:
        """Kill the process."""
        self.kill()
        self.wait()
        self.connection.close()


@dataclasses.dataclass
class ForkedJob:
    """A running job of forked ranks, with the methods `poll` and `wait` of `subprocess.Popen`.

    Attributes:
        server: the process that runs the job, and can run other jobs afterwards.
        folder: the job's folder.
    """

    server: ServerProcess
    folder: RunFolder
    _exit_code: int | None = None

    def poll(self) -> int | None:
        """Return the job's exit code, or None while the job runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the job has ended; return its exit code, which is not 0 after a failure.

        Raises:
            subprocess.TimeoutExpired: the job still runs after `timeout` seconds.
        """
        if self._exit_code is None:
            if not self.server.connection.poll(timeout):
                raise subprocess.TimeoutExpired(self.server.args, timeout or 0)
            try:
                self._exit_code = int(self.server.connection.recv())
            except ENDED:
                said = self.server.last_words()
                with contextlib.suppress(OSError), self.folder.log.open("a", encoding="utf-8") as log:  # a full disk
                    log.write(f"{said}\n")
                self._exit_code = self.server.wait() or 1
        return self._exit_code
