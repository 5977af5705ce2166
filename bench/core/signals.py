"""The signals that ask the program to end: Ctrl-C, a scheduler's or a shell's SIGTERM, a terminal that is closed."""

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
    """From now on they end the program, with one sentence and no traceback, as long as it has nothing to tidy up.

    An exception would not do: what is being imported when it is raised may turn it into another one, or swallow it.
    """
    _handle(_end)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block the first of them raises KeyboardInterrupt, so that there is time to tidy up.

    Those that follow do nothing: `timeout` sends two, and the second would cut short what the first one began.

    Raises:
        Interrupted: the block let the KeyboardInterrupt pass.
    """
    if threading.current_thread() is not threading.main_thread():  # where no signal arrives
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
    """Set the handler of those that are not ignored (`nohup` ignores SIGHUP); what handled them before."""
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
    """Nothing; unlike SIG_IGN it is not inherited by processes that are started meanwhile."""
