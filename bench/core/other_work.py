"""Measure the share of this machine's cores that other programs use: CPU time of the cores minus that of the run.

Ranks of the run that share cores do not count as other programs.

Source: proc_stat(5) and proc_pid_stat(5), read with psutil in steps of 10 ms.
"""

from __future__ import annotations

import os

import psutil

# Share of the cores' time from which the user is warned; an idle machine uses less by itself.
NOTEWORTHY_SHARE = 0.1


class OtherWork:
    """Adds up other programs' CPU time on the usable cores between calls of `start` and `stop`.

    Args:
        root: process id of the run's first process; its descendants are part of the run.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._others_s = self._cores_s = 0.0
        self._began: tuple[float, float] | None = None

    def start(self) -> None:
        """Start counting."""
        self._began = _others_and_cores_s(self._root)

    def stop(self) -> None:
        """Stop counting."""
        if self._began is not None:
            others_s, cores_s = _others_and_cores_s(self._root)
            self._others_s += others_s - self._began[0]
            self._cores_s += cores_s - self._began[1]

    @property
    def share(self) -> float | None:
        """Share of the cores' time that other programs used, 0 to 1; None if no time has passed."""
        return min(1.0, max(0.0, self._others_s / self._cores_s)) if self._cores_s > 0.0 else None


def launcher_of_rank() -> int:
    """Return the process id of the parent of this rank's parent process."""
    above = psutil.Process().parents()[:2]
    return int(above[-1].pid) if above else os.getpid()


def _others_and_cores_s(root: int) -> tuple[float, float]:
    """Return CPU seconds of all programs but the run's, and total seconds of the usable cores, since the boot."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in usable]
    stolen_s = sum(getattr(core, "steal", 0.0) for core in cores)  # used by other virtual machines
    busy_s = stolen_s + sum(core.user + core.system + getattr(core, "nice", 0.0) for core in cores)
    waiting_s = sum(
        core.idle + sum(getattr(core, name, 0.0) for name in ("iowait", "irq", "softirq")) for core in cores
    )
    return busy_s - _used_s(root), busy_s + waiting_s


def _used_s(root: int) -> float:
    """Return CPU seconds of a process and its descendants, including those that have ended."""
    try:
        first = psutil.Process(root)
        processes = [first, *first.children(recursive=True)]
    except psutil.Error:
        return 0.0
    return sum(map(_own_s, processes))


def _own_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # the process has just ended, so its parent's times include it
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
