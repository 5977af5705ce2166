"""Handle the signals that ask the program to end: Ctrl-C, SIGTERM, and SIGHUP from a terminal that is closed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from bench.core.errors import Interrupted

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    _handle(_ignore)
    raise KeyboardInterrupt


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Do nothing; unlike SIG_IGN, this is not inherited by child processes."""
