"""A `bench` job under attack: its launchers, its processes, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.testing.invoke import Answer, start

MARK = "BENCH_ATTACK"
ENDS_WITHIN_S = 150.0
GONE_WITHIN_S = 8.0
SHARED_MEMORY = Path("/dev/shm")


class Job:
    """One or several launchers of one job, with separate folders for temporary files, state and results.

    Args:
        folder: an empty folder.
        commands: arguments of `bench`, one list per launcher.
    """

    def __init__(self, folder: Path, commands: Sequence[Sequence[str]]) -> None:
        self.out = folder / "out"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.variables = {
            MARK: uuid.uuid4().hex,
            "TMPDIR": str(self.temporary),
            "XDG_STATE_HOME": str(folder / "state"),
            "PYTHONWARNINGS": "default",
        }
        self._shared_before = set(SHARED_MEMORY.iterdir())
        self.launchers = [start(*command, "--out", str(self.out), **self.variables) for command in commands]

    def processes(self) -> dict[int, psutil.Process]:
        """Return every process of the job by its id, launchers included: those with its mark in their environment."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.variables[MARK] and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process
        return found

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Return the job's processes by role."""
        everyone = self.processes()
        roles: dict[str, list[psutil.Process]] = {}
        for process in everyone.values():
            with contextlib.suppress(psutil.Error):
                roles.setdefault(_role(process, everyone), []).append(process)
        return roles

    def wait(self) -> list[Answer]:
        """Return the exit codes and outputs of the launchers.

        Raises:
            TimeoutError: one of them did not end.
        """
        answers = []
        for launcher in self.launchers:
            try:
                out, error = launcher.communicate(timeout=ENDS_WITHIN_S)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"a launcher did not end within {ENDS_WITHIN_S:g} s") from None
            answers.append(Answer(launcher.returncode, out, error))
        return answers

    def next_command(self) -> Answer:
        """Run a small command afterwards in the same folders."""
        arguments = ["run", "--model", "linear", "--dataset", "digits", "--steps", "1", "--world-size", "1"]
        process = start(*arguments, "--out", str(self.out.parent / "next"), **self.variables)
        out, error = process.communicate(timeout=ENDS_WITHIN_S)
        return Answer(process.returncode, out, error)

    def left(self) -> list[str]:
        """Return the processes and shared memory that are left after every launcher has ended."""
        deadline = time.monotonic() + GONE_WITHIN_S
        while (alive := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        names = []
        for process in alive.values():
            with contextlib.suppress(psutil.Error):
                names.append(f"process {process.pid} {' '.join(process.cmdline())[:80]}")
        shared = set(SHARED_MEMORY.iterdir()) - self._shared_before
        return names + [str(path) for path in shared if path.name.startswith("gradwire")]

    def close(self) -> None:
        """Kill all remaining processes and remove shared memory, so that the next try starts clean."""
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error):
                process.kill()
        for launcher in self.launchers:
            launcher.kill()
            launcher.communicate()
        for path in set(SHARED_MEMORY.iterdir()) - self._shared_before:
            if path.name.startswith("gradwire"):
                path.unlink(missing_ok=True)


def free_port() -> int:
    """Return a port on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _role(process: psutil.Process, everyone: dict[int, psutil.Process]) -> str:
    words = process.cmdline()
    text = " ".join(words)
    if "bench.rank.fork_server" in text:
        above = everyone.get(process.ppid())
        return "rank" if above is not None and "bench.rank.fork_server" in " ".join(above.cmdline()) else "fork server"
    if "torch.distributed.run" in text:
        return "agent"
    if "bench.rank.worker" in text:
        return "rank"
    if "bench.hosts.supervisor" in text:
        return "supervisor"
    return (
        "bench" if words[:1] == [sys.executable] and "-m bench" in text and os.getpid() == process.ppid() else "other"
    )
