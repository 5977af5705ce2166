"""Slow hosts: stop and continue a virtual host's processes, so that they run for a set share of the time.

It needs no permission and leaves nothing behind, unlike a control group; and unlike `nice` it also slows a host down
while processors are idle. The kernel's own CPU quota works the same way, stopping a group for the rest of each period.
Source: cpulimit(1); Linux sched-bwc.rst (CFS bandwidth control).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

_PERIOD_S = 0.01
_SEARCH_EVERY_S = 0.25


class SlowHost:
    """Limits every process of one network namespace; its thread ends with the process that made it."""

    def __init__(self, namespace: str, cpu_share: float) -> None:
        """Start limiting.

        Args:
            namespace: the host's network namespace, as `ip netns` knows it.
            cpu_share: share of the time in which its processes may run, above 0 and below 1.
        """
        self._namespace_inode = Path("/run/netns", namespace).stat().st_ino
        self._running_s = cpu_share * _PERIOD_S
        self._released = threading.Event()
        threading.Thread(target=self._limit, name=f"slow-{namespace}", daemon=True).start()

    def release(self) -> None:
        """Let the processes run freely from now on; a stopped process would not see a signal to end."""
        self._released.set()

    def _limit(self) -> None:
        searched, processes = -_SEARCH_EVERY_S, list[int]()
        while not self._released.is_set():
            if time.monotonic() - searched >= _SEARCH_EVERY_S:
                searched, processes = time.monotonic(), self._find()
            _signal(processes, signal.SIGSTOP)
            self._released.wait(_PERIOD_S - self._running_s)
            _signal(processes, signal.SIGCONT)
            time.sleep(self._running_s)

    def _find(self) -> list[int]:
        """Process ids inside the namespace; the private /proc lists only this job's."""
        found = []
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal() and folder.name != str(os.getpid()):
                try:
                    inode = (folder / "ns" / "net").stat().st_ino
                except OSError:  # it ended meanwhile
                    continue
                if inode == self._namespace_inode:
                    found.append(int(folder.name))
        return found


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process, number)
        except ProcessLookupError:
            continue
