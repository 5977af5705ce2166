"""Helpers for child processes: their import path, how they were killed, ending with their parent, peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from bench.core.errors import Interrupted

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Time for a virtual host's command to end after SIGTERM, before it is killed.
STOP_GRACE_S = 5.0


def end_at_once() -> None:
    """Make these signals end the program immediately with one sentence, for as long as it has nothing to clean up.

    An exception would not work: a module that is just being imported may replace or swallow it.
    """
    _handle(_end)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first of these signals inside the block, which can then clean up.

    Later signals are ignored: `timeout` sends two, and the second would interrupt the cleaning up.

    Raises:
        Interrupted: the block did not catch the KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():  # signals arrive only there
        yield
        return
    before = _handle(_interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Set the handler of all signals that are not ignored (`nohup` ignores SIGHUP); return the old handlers."""
    heeded = [number for number in NUMBERS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heeded}


def _end(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
        os.write(2, b"bench: interrupted\n")
    os._exit(Interrupted.exit_code)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    _handle(lambda *_: None)  # unlike SIG_IGN, this is not inherited by child processes
    raise KeyboardInterrupt


_PACKAGES = Path(__file__).resolve().parents[2]
_PR_SET_PDEATHSIG = 1


def import_variables() -> dict[str, str]:
    """Return variables that let a child Python import this process's packages, and nothing from the working directory.

    `python -m` would search the working directory first, where a user's own `bench.py` would hide the package.
    """
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_installed = _PACKAGES in map(Path, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    entries = list(dict.fromkeys(given if is_installed else [str(_PACKAGES), *given]))
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(entries)} if entries else {})


def killed_by(who: str, number: int) -> str:
    """Return a sentence that names the signal that killed a process."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = "; the machine may have run out of memory" if number == signal.SIGKILL else ""
    return f"{who} was killed by {name}{hint}"


def die_with_parent() -> None:
    """Ask Linux to kill this process as soon as its parent ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def peak_rss_bytes() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
