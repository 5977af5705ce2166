"""Threads inside a network namespace: one process can hold sockets on every virtual host.

Source: Linux setns(2): a network namespace belongs to the thread, and a socket to the namespace it was opened in.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")

_CLONE_NEWNET = 0x40000000


def start_in(namespace: str, fn: Callable[[], Result]) -> Future[Result]:
    """Run `fn` in a new thread whose network namespace is the given one; the thread ends with `fn`.

    Args:
        namespace: a name that `ip netns` knows.
        fn: what to run.
    """
    outcome: Future[Result] = Future()

    def body() -> None:
        try:
            _enter(namespace)
            outcome.set_result(fn())
        except BaseException as error:  # noqa: BLE001 - handed to whoever asks for the result
            outcome.set_exception(error)

    threading.Thread(target=body, name=f"in-{namespace}", daemon=True).start()
    return outcome


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns exists from Python 3.12 on
    descriptor = os.open(f"/run/netns/{namespace}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), namespace)
    finally:
        os.close(descriptor)
