"""ForkServer: a process imports torch, plans a command's jobs and forks their ranks; the launcher needs no torch.

Importing takes longer than a small run trains, so it begins with the command. The process serves one command and ends
with it, however that ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

from bench.core import environment
from bench.core.config.job import RanksConfig
from bench.core.errors import RunFailed, UsageError
from bench.core.processes import die_with_parent
from bench.core.run_folder import RunFolder
from bench.launch.jobs.placement import place
from bench.launch.jobs.variables import local_variables

SERVER = "bench.train.fork_server"
TRAIN = "bench.train.worker"
SUM = "bench.micro.collectives_worker"
ENCODE = "bench.micro.compressors_worker"
CALIBRATE = "bench.micro.calibration_worker"
STDERR = 2
P = ParamSpec("P")
T = TypeVar("T")
# What reading from a process that has ended raises; the second if it had something left to read.
ENDED = (EOFError, ConnectionResetError)


class ForkServer:
    """Starts the jobs of one command on this machine, one after the other; a context that leaves no process behind.

    Jobs whose ranks have equally many threads are forked from one process.

    Args:
        module: what every rank runs.
    """

    def __init__(self, module: str) -> None:
        environment.kernels()  # what the environment asks for is refused here, not by a rank
        _check_locks()
        self.module = module
        self._processes: dict[int, ServerProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, threads: int) -> None:
        """Begin to import, for jobs with so many threads per rank."""
        if threads in self._processes:
            self._processes[threads].close()
        self._processes[threads] = ServerProcess(self.module, threads)

    def warm_up_for(self, asked: RanksConfig) -> None:
        """Begin to import for a job, unless its ranks are not forked: on virtual hosts, or on several machines.

        Raises:
            UsageError: options that contradict each other, or a cluster that cannot be.
        """
        placed = place(asked)
        if placed.nnodes == 1 and placed.cluster is None:
            self.warm_up(placed.threads)

    def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the function returns in the process that has torch; in this one where no ranks are forked.

        Raises:
            Exception: what the function raises.
            RunFailed: the process ended instead.
        """
        if not self._processes:
            return function(*args, **kwargs)
        process = next(iter(self._processes.values()))
        process.send((function, args, kwargs))
        try:
            answer = process.connection.recv()
        except ENDED:
            raise RunFailed(
                f"the job could not be planned: {process.last_words()}{environment.possible_causes()}"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        result: T = answer
        return result

    def start(self, folder: RunFolder, *, num_ranks: int, threads: int, device: str) -> ForkedJob:
        """Start a job; the one before it must have ended.

        Args:
            folder: the job's folder, the module's only argument.
            num_ranks: processes, each a rank.
            threads: per rank.
            device: cpu, or cuda, which does not survive a fork: there every rank imports by itself.
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
        """End the processes, which have nothing to lose between two jobs."""
        while self._processes:
            self._processes.popitem()[1].close()


def _check_locks() -> None:
    """Refuse a machine on which processes cannot share locks, which lie on /dev/shm.

    Raises:
        UsageError: e.g. it is read-only.
    """
    try:
        multiprocessing.Lock()
    except (ImportError, OSError) as error:
        raise UsageError(
            f"processes cannot share locks, which need a writable /dev/shm ({error}); mount one: mount -t tmpfs tmpfs "
            "/dev/shm"
        ) from None


class ServerProcess(subprocess.Popen[bytes]):
    """One of its processes.

    Args:
        module: what every rank runs.
        threads: of each rank.

    Attributes:
        connection: takes requests and gives answers, one for each.
    """

    def __init__(self, module: str, threads: int) -> None:
        self.connection, far_end = multiprocessing.Pipe()
        with far_end:
            super().__init__(
                [sys.executable, "-m", SERVER, module, str(far_end.fileno())],
                pass_fds=[far_end.fileno()],
                env=os.environ | local_variables(threads),
                stdin=subprocess.DEVNULL,
                stdout=STDERR,  # which the user sees, until a job has its log
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which then stops the job in order
                preexec_fn=die_with_parent,
            )

    def send(self, request: object) -> None:
        """Ask for something; whether the process has ended shows when it is to answer."""
        with contextlib.suppress(BrokenPipeError):
            self.connection.send(request)

    def last_words(self) -> str:
        """Wait for the end of the process and say how it came about."""
        exit_code = self.wait()
        end = f"was killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"ended with code {exit_code}"
        return f"the process that the ranks are forked from {end}"

    def close(self) -> None:
        """Kill it."""
        self.kill()
        self.wait()
        self.connection.close()


class ForkedJob:
    """A job under way, used like `subprocess.Popen`.

    Args:
        server: the process that was asked to run it and can run others when it has ended.
        folder: the job's folder.
    """

    def __init__(self, server: ServerProcess, folder: RunFolder) -> None:
        self.server = server
        self._folder = folder
        self._exit_code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while the job runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code: 0, or another one after a failure.

        Raises:
            subprocess.TimeoutExpired: the job still runs after `timeout` seconds.
        """
        if self._exit_code is None:
            if not self.server.connection.poll(timeout):
                raise subprocess.TimeoutExpired(self.server.args, timeout or 0)
            try:
                self._exit_code = int(self.server.connection.recv())
            except ENDED:
                self._exit_code = self._lost_server()
        return self._exit_code

    def tidy_up(self) -> None:
        """Remove what ranks needed to meet; the job must have ended."""
        shutil.rmtree(self._folder.rendezvous)

    def _lost_server(self) -> int:
        """The server's own exit code; how it ended goes to the job's log, where failures are looked up."""
        said = self.server.last_words()
        with contextlib.suppress(OSError), self._folder.log.open("a", encoding="utf-8") as log:  # a full disk is seen
            log.write(f"{said}\n")
        return self.server.wait() or 1
