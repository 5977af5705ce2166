"""ForkServer: one process that imports what ranks need, once; the ranks of all of a command's jobs are forked from it.

Importing takes longer than a small run trains, so it begins with the command and goes on while the run is planned. The
process serves one command and ends with it, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from typing import IO, Any, Self

from bench.core.job_config import RanksConfig
from bench.core.processes import die_with_parent
from bench.core.run_folder import RunFolder
from bench.launch.placement import place
from bench.launch.variables import local_variables

SERVER = "bench.train.fork_server"
TRAIN = "bench.train.worker"
SUM = "bench.micro.collectives_worker"
ENCODE = "bench.micro.compressors_worker"
# Where the modules are that planning a job has brought in and its ranks need too.
COMPONENTS = (
    "bench.models.",
    "bench.datasets.",
    "bench.optimizers.",
    "bench.strategies.",
    "compressors.",
    "collectives.",
)


def warmed_server(module: str, asked: RanksConfig) -> ForkServer:
    """A server that is importing already, so that this can go on while the job is planned.

    Args:
        module: what every rank runs.
        asked: where the user wants the ranks; those on virtual hosts or several machines are not forked.

    Raises:
        UsageError: options that contradict each other, or a cluster that cannot be.
    """
    server = ForkServer(module)
    placed = place(asked)
    if placed.nnodes == 1 and placed.cluster is None:
        server.warm_up(placed.threads)
    return server


class ForkServer:
    """Starts the jobs of one command on this machine, one after the other; a context that leaves no process behind.

    Args:
        module: what every rank runs.
    """

    def __init__(self, module: str) -> None:
        self.module = module
        self._threads = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self, threads: int) -> None:
        """Begin to import, for jobs with so many threads per rank; other threads need another process later."""
        self.close()
        self._threads = threads
        # What goes wrong before there is a job to tell it.
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", SERVER, self.module],
            env=os.environ | local_variables(threads),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._output,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches the launcher alone, which then stops the job in order
            preexec_fn=die_with_parent,
        )

    def start(self, folder: RunFolder, *, num_ranks: int, threads: int, device: str) -> ForkedJob:
        """Start a job; the one before it must have ended.

        Args:
            folder: the job's folder, the module's only argument.
            num_ranks: processes, each a rank.
            threads: per rank.
            device: cpu, or cuda, which does not survive a fork: there every rank imports by itself.
        """
        if self._process is None or self._process.poll() is not None or self._threads != threads:
            self.warm_up(threads)
        assert self._process is not None
        assert self._output is not None
        folder.rendezvous.mkdir(mode=0o700)
        job = {
            "folder": str(folder.path.absolute()),
            "num_ranks": num_ranks,
            "start_method": "fork" if device == "cpu" else "spawn",
            "modules": [name for name in sys.modules if name.startswith(COMPONENTS)],
        }
        return ForkedJob(self._process, self._output, folder, job)

    def close(self) -> None:
        """End the process, which has nothing to lose between two jobs."""
        if self._process is None or self._output is None:
            return
        self._process.kill()
        self._process.communicate()
        self._output.close()
        self._process = None


class ForkedJob:
    """A job under way, used like `subprocess.Popen`.

    Args:
        server: the process that runs it and can run others when it has ended.
        early_output: what the server printed before any job.
        folder: the job's folder.
        job: what the server is asked to run.
    """

    def __init__(
        self, server: subprocess.Popen[bytes], early_output: IO[bytes], folder: RunFolder, job: dict[str, Any]
    ) -> None:
        self.server = server
        self._early_output = early_output
        self._folder = folder
        self._exit_code: int | None = None
        assert server.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `wait` finds
            server.stdin.write(json.dumps(job).encode() + b"\n")

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
            answers = self.server.stdout
            assert answers is not None
            if not select.select([answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.server.args, timeout or 0)
            answer = answers.readline()
            self._exit_code = int(answer) if answer else self._lost_server()
        return self._exit_code

    def tidy_up(self) -> None:
        """Remove what ranks needed to meet; the job must have ended."""
        shutil.rmtree(self._folder.rendezvous)

    def _lost_server(self) -> int:
        """The server's own exit code; what it printed goes to the job's log, where failures are looked up."""
        exit_code = self.server.wait()
        self._early_output.seek(0)
        said = self._early_output.read()
        if exit_code < 0:
            name = signal.Signals(-exit_code).name
            said += f"the process that the ranks are forked from was killed by {name}\n".encode()
        with contextlib.suppress(OSError), self._folder.log.open("ab") as log:  # a full disk is seen by itself
            log.write(said)
        return exit_code or 1
