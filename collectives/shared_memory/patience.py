"""How a rank waits for what others store: it looks again at once, and after a while it sleeps between looks."""

from __future__ import annotations

import os
import time

LOOKS_BEFORE_SLEEP = 100
SLEEP_S = 50e-6


class Patience:
    """One wait.

    Args:
        timeout_s: how long it may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._looks = 0

    def pause(self) -> bool:
        """Wait a little before the next look; return whether there is time for one."""
        self._looks += 1
        if self._looks <= LOOKS_BEFORE_SLEEP:
            os.sched_yield()
            return True
        time.sleep(SLEEP_S)
        return time.monotonic() < self._deadline

    def renew(self) -> None:
        """Something has come, so more may come soon: look closely again. The deadline stays."""
        self._looks = 0
