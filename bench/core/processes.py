"""Helpers for processes: signals, imports in children, ending with the parent, namespaces, peak memory."""

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


def end_at_once() -> None:
    """Make SIGINT, SIGTERM and SIGHUP end the program immediately with one sentence on stderr.

    Use this function while there is nothing to clean up yet. During this time, a signal handler that raises an
    exception would not work, because a module that is being imported may replace or swallow the exception.
    """
    _handle(_end)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block at the first SIGINT, SIGTERM or SIGHUP, so that the block can clean up.

    Later signals are ignored: the program `timeout` sends two signals, and the second would interrupt the cleaning up.

    Raises:
        Interrupted: the block did not catch the KeyboardInterrupt.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
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
    """Set the handler of the signals in `NUMBERS` that are not ignored (`nohup` ignores SIGHUP); return the old ones.

    A handler that was not set in Python, but by a program that embeds Python, is kept, because Python could not
    restore it.
    """
    heeded = [number for number in NUMBERS if signal.getsignal(number) not in (signal.SIG_IGN, None)]
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
    """Return environment variables with which a child Python process imports the same packages as this process.

    The child imports nothing from the working directory, which `python -m` would search first: a user's own `bench.py`
    there would hide the package.
    """
    given = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    is_installed = _PACKAGES in map(Path, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    entries = list(dict.fromkeys(given if is_installed else [str(_PACKAGES), *given]))
    return {"PYTHONSAFEPATH": "1"} | ({"PYTHONPATH": os.pathsep.join(entries)} if entries else {})


def killed_by(who: str, number: int) -> str:
    """Return a sentence such as "rank 1 was killed by SIGKILL; the machine may have run out of memory"."""
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    hint = "; the machine may have run out of memory" if number == signal.SIGKILL else ""
    return f"{who} was killed by {name}{hint}"


def die_with_parent() -> None:
    """Ask Linux to kill this process as soon as its parent process ends, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter_namespaces(*namespaces: Path) -> None:
    """Move the calling thread into Linux namespaces, one after the other; its later child processes start in them.

    Args:
        namespaces: files of the namespaces, such as /proc/1/ns/net. Only a process with a single thread can enter a
            user namespace.

    Raises:
        OSError: the namespaces have ended, or this process may not enter them.
    """
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists from Python 3.12 on
    with contextlib.ExitStack() as files:
        for file in [files.enter_context(path.open("rb")) for path in namespaces]:
            if libc.setns(file.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file.name)


def own_rank() -> int:
    """Return the rank of this process in the job, from the environment variable `RANK` that the launcher sets."""
    return int(os.environ.get("RANK", "0"))


def peak_rss_bytes() -> int:
    """Return the largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
