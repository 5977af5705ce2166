"""How much of a processor the forwarder between virtual hosts takes, by the kernel's account of its thread.

What a receiving host's TCP does with a frame happens while the forwarder hands it on, and is part of it.
Source: Linux, `/proc/<pid>/task/<tid>/stat` (proc_pid_stat(5)), utime and stime.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

# Set for every process on a virtual host whose frames are forwarded: the thread's name below /proc.
FORWARDER_VARIABLE = "BENCH_FORWARDER_TASK"

_UTIME, _STIME = 11, 12  # counted after the name, which ends with the last bracket


def forwarder_cpu_s(task: str | None = None) -> float | None:
    """Seconds that it has used since it began, in steps of 10 ms; None where there is no forwarder."""
    task = task or os.environ.get(FORWARDER_VARIABLE)
    if task is None:
        return None
    figures = Path("/proc", task, "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    return (int(figures[_UTIME]) + int(figures[_STIME])) / os.sysconf("SC_CLK_TCK")


class ForwarderUse:
    """How much it takes between `start` and `stop`, however often."""

    def __init__(self) -> None:
        self.cpu_s = self.wall_s = 0.0
        self._began: tuple[float, float] | None = None

    def start(self) -> None:
        """From now on its use counts."""
        cpu_s = forwarder_cpu_s()
        self._began = None if cpu_s is None else (cpu_s, time.perf_counter())

    def stop(self) -> None:
        """From now on it does not."""
        cpu_s = forwarder_cpu_s()
        if self._began is not None and cpu_s is not None:
            self.cpu_s += cpu_s - self._began[0]
            self.wall_s += time.perf_counter() - self._began[1]

    @property
    def share(self) -> float | None:
        """Of one processor; None where there is no forwarder, or no time has passed."""
        return self.cpu_s / self.wall_s if self.wall_s else None
