"""Measure the CPU time of the parts of an exchange, by wrapping the functions that belong to each part.

A function's time excludes that of other wrapped functions that it calls. The table names the functions of two versions
of the exchange; those that a version lacks are skipped.
"""

from __future__ import annotations

import collections
import functools
import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PARTS = {
    "copy in": ("gradwire.exchange.report:Bucket.screen", "gradwire.ddp.hook:CompressionHook._screen"),
    "encode": (
        "gradwire.exchange.reducer:PerLayerReducer._encode",
        "compressors.powersgd:PowerSgd.reduce",
    ),
    "pack": ("collectives.transport.messages:pack",),
    "send": (
        "collectives.transport.sockets:SocketTransport._post",
        "collectives.transport.process_group:ProcessGroupTransport.post",
    ),
    "wait": (
        "collectives.transport.sockets:SocketTransport._wait",
        "collectives.transport.process_group:_Operation.wait",
    ),
    "unpack and add": (
        "collectives.schedule.execution:PackedPieces.apply",
        "collectives.payloads.bundle:UnreducedSum.add_to_",
    ),
    "report": ("gradwire.exchange.reducer:PerLayerReducer._report",),
    "write out": (
        "gradwire.exchange.reducer:PerLayerReducer._finish",
        "gradwire.exchange.reducer:PerLayerReducer.finish_bucket",
    ),
}
"""Part -> its functions, as "module:name"."""

REST = "rest of the exchange thread"
BACKWARD = "the thread of backward"
OTHER = "other threads (gloo's)"
ALL = (*PARTS, REST, BACKWARD, OTHER)


class CpuByPart:
    """CPU seconds of each part since the last `start`, from the clocks of the threads.

    Create it before other modules use the functions, because it replaces them.

    Args:
        parts: the parts to measure; without any, no function is replaced.
    """

    def __init__(self, parts: Mapping[str, Sequence[str]] = PARTS) -> None:
        self._seconds: collections.Counter[str] = collections.Counter()
        self._open = threading.local()
        self._exchange_thread: int | None = None
        for part, names in parts.items():
            for name in names:
                self._wrap(part, name)

    def start(self) -> None:
        self._seconds.clear()
        self._before = self._clocks()

    def stop(self) -> dict[str, float]:
        """Return the CPU seconds of every part; the last three are the time outside the wrapped functions."""
        process, backward, exchange = (now - then for now, then in zip(self._clocks(), self._before, strict=True))
        named = sum(self._seconds.values())
        rest = exchange - named if self._exchange_thread is not None else 0.0
        others = {REST: rest, BACKWARD: backward, OTHER: process - backward - exchange}
        return {part: self._seconds[part] for part in PARTS} | others

    def _clocks(self) -> tuple[float, float, float]:
        exchange = 0.0
        if self._exchange_thread is not None:
            exchange = time.clock_gettime(time.pthread_getcpuclockid(self._exchange_thread))
        return time.process_time(), time.thread_time(), exchange

    def watch(self, thread_name: str = "exchange") -> None:
        """Find the newest thread with this name: the one whose CPU time is divided into parts."""
        found = [thread.ident for thread in threading.enumerate() if thread.name == thread_name]
        self._exchange_thread = found[-1] if found else None

    def _wrap(self, part: str, name: str) -> None:
        module_name, _, path = name.partition(":")
        *owners, function_name = path.split(".")
        try:
            owner: Any = importlib.import_module(module_name)
        except ModuleNotFoundError:  # of an older or newer checkout
            return
        for step in owners:
            owner = getattr(owner, step, None)
        function = vars(owner).get(function_name) if owner is not None else None
        if function is not None:
            setattr(owner, function_name, self._timed(part, function))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._exchange_thread:
                return function(*args, **kwargs)
            around, self._open.inside = getattr(self._open, "inside", 0.0), 0.0
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.thread_time() - started
                self._seconds[part] += whole - self._open.inside
                self._open.inside = around + whole

        return timed
