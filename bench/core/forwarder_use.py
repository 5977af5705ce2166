"""Measure the CPU time of the forwarder between virtual hosts, as the kernel accounts it to the forwarder's thread.

It includes the receiving host's TCP work, which the kernel does while the forwarder passes a frame on.
Source: Linux, `/proc/<pid>/task/<tid>/stat` (proc_pid_stat(5)), utime and stime.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# Set for every process on a virtual host with a forwarder: the path of the forwarder's thread below /proc.
FORWARDER_VARIABLE = "BENCH_FORWARDER_TASK"

_UTIME, _STIME = 11, 12  # fields of /proc/.../stat after the process's name, which ends with the last bracket


def forwarder_cpu_s(task: str | None = None) -> float | None:
    """Return the CPU seconds of the forwarder since it started, in steps of 10 ms; None if there is no forwarder."""
    task = task or os.environ.get(FORWARDER_VARIABLE)
    if task is None:
        return None
    figures = Path("/proc", task, "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(figures[_UTIME]) + int(figures[_STIME])) / os.sysconf("SC_CLK_TCK")


class ForwarderUse:
    """Adds up the forwarder's CPU time between calls of `start` and `stop`."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0
        self._began: tuple[float, float] | None = None

    def start(self) -> None:
        """Start counting."""
        cpu_s = forwarder_cpu_s()
        self._began = None if cpu_s is None else (cpu_s, time.perf_counter())

    def stop(self) -> None:
        """Stop counting."""
        cpu_s = forwarder_cpu_s()
        if self._began is not None and cpu_s is not None:
            self.cpu_s += cpu_s - self._began[0]
            self.wall_s += time.perf_counter() - self._began[1]

    @property
    def share(self) -> float | None:
        """Share of one core that the forwarder used; None if there is no forwarder, or no time has passed."""
        return self.cpu_s / self.wall_s if self.wall_s else None
