"""Say on stderr what a command is doing, if it takes longer than half a second and shows no progress of its own.

The lines come from an alarm signal and not from a thread, because a process without threads must start the ranks. Each
line comes four times as late as the previous one, so that a log stays short.
"""

import contextlib
import os
import signal
import threading
import time
from types import FrameType

FIRST_S, FACTOR = 0.5, 4.0
STDERR = 2


class ProgressLine:
    """Prints what the running command is doing, from `begin` to `end`."""

    def __init__(self) -> None:
        self._command, self._doing = "", ""
        self._started, self._has_told = 0.0, False

    def begin(self, command: str) -> None:
        """Print lines from now on, the first one after half a second; in a thread that gets no signals, do nothing."""
        if threading.current_thread() is threading.main_thread():
            self._command, self._started = command, time.monotonic()
            signal.signal(signal.SIGALRM, self._tell)
            signal.setitimer(signal.ITIMER_REAL, FIRST_S)

    def doing(self, text: str) -> None:
        """Set what the next line says, such as "predicting topk (3 of 20)"."""
        self._doing = text

    def end(self) -> None:
        """Print no more lines, because the command ends or shows its own progress."""
        if self._command:
            self._command = ""
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    def _tell(self, number: int, frame: FrameType | None) -> None:
        if not self._command:
            return
        seconds = time.monotonic() - self._started
        line = f"bench {self._command}: {self._doing or 'starting'} ({seconds:.1f} s)\n"
        if self._doing or not self._has_told:
            with contextlib.suppress(OSError):
                os.write(STDERR, line.encode(errors="replace"))  # not `print`, which the signal may have interrupted
        self._has_told = True
        signal.setitimer(signal.ITIMER_REAL, seconds * (FACTOR - 1))


waiting = ProgressLine()
