"""How much of this machine's cores other programs take: what the kernel counts there, less what it counts of the run.

Ranks that share cores with each other are no other work. Sources: proc_stat(5) and proc_pid_stat(5), read by psutil in
steps of 10 ms.
"""

from __future__ import annotations

import os

import psutil

NOTEWORTHY_SHARE = 0.1
"""of the cores' time; less is what an idle machine does by itself"""


class OtherWork:
    """Other programs' use of the cores that this process may use, between `start` and `stop`, however often.

    Args:
        root: id of the run's first process; what that has started is part of the run.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._others_s = self._cores_s = 0.0
        self._began: tuple[float, float] | None = None

    def start(self) -> None:
        """From now on their use counts."""
        self._began = _others_and_cores_s(self._root)

    def stop(self) -> None:
        """From now on it does not."""
        if self._began is not None:
            others_s, cores_s = _others_and_cores_s(self._root)
            self._others_s += others_s - self._began[0]
            self._cores_s += cores_s - self._began[1]

    @property
    def share(self) -> float | None:
        """0 to 1, of the cores' time; None where no time has passed."""
        return min(1.0, max(0.0, self._others_s / self._cores_s)) if self._cores_s > 0.0 else None


def launcher_of_rank() -> int:
    """Return the id of the process that started the one which started this rank."""
    above = psutil.Process().parents()[:2]
    return int(above[-1].pid) if above else os.getpid()


def _others_and_cores_s(root: int) -> tuple[float, float]:
    """Return seconds of all programs but the run's, and of all cores, idle ones too, since the machine started."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = [core for number, core in enumerate(psutil.cpu_times(percpu=True)) if number in usable]
    stolen_s = sum(getattr(core, "steal", 0.0) for core in cores)  # by other virtual machines
    busy_s = stolen_s + sum(core.user + core.system + getattr(core, "nice", 0.0) for core in cores)
    waiting_s = sum(
        core.idle + sum(getattr(core, name, 0.0) for name in ("iowait", "irq", "softirq")) for core in cores
    )
    return busy_s - _used_s(root), busy_s + waiting_s


def _used_s(root: int) -> float:
    """Return CPU seconds of a process and all that it has started, those that have ended included."""
    try:
        first = psutil.Process(root)
        processes = [first, *first.children(recursive=True)]
    except psutil.Error:
        return 0.0
    return sum(map(_own_s, processes))


def _own_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has just ended, and its parent counts it
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
