"""This machine's shared memory as a link, measured: two processes that pass messages to and fro through one mapping."""

from __future__ import annotations

import mmap
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.core import processes
from bench.core.errors import RunFailed
from bench.core.processes import die_with_parent
from bench.extensions.place.catalog import LinkKind
from collectives.transport.mapped_memory import SpinThenSleep

LONG_NBYTES = 2**24
_SHORT_NBYTES = 8
_MESSAGES = (_SHORT_NBYTES,) * 200 + (LONG_NBYTES,) * 15
_LONGEST_WAIT_S = 30.0
_LINE = 128  # bytes apart, so that no cache line holds both sides' counters


def measured_link() -> LinkKind:
    """Measure the time of a short and of a long message one way, from and to memory outside the mapping.

    Raises:
        RunFailed: the other process did not answer.
        Interrupted: the user ended it; no memory is left behind.
    """
    folder = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with processes.interruptible(), tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(mmap.PAGESIZE + LONG_NBYTES)
        other = multiprocessing.get_context("spawn").Process(target=_answer, args=(file.name,), daemon=True)
        other.start()
        try:
            short_s, long_s = _ask(_Side(file.name, own=0))
        finally:
            other.terminate()
            other.join()
    return LinkKind(
        bytes_per_s=(LONG_NBYTES - _SHORT_NBYTES) / (long_s - short_s),
        latency_s=short_s,
        figures="measured",
        source="two processes on this machine, through memory that both map",
    )


class _Side:
    """One process's view: a counter of each side, and the room for messages."""

    def __init__(self, path: str, own: int) -> None:
        with open(path, "r+b") as file:  # noqa: PTH123 - a mapping needs the handle
            mapping = mmap.mmap(file.fileno(), 0)
        self._counters = np.frombuffer(mapping, dtype=np.uint64, count=2 * _LINE // 8)[:: _LINE // 8]
        self._room = np.frombuffer(mapping, dtype=np.uint8, offset=mmap.PAGESIZE)
        self._memory = np.ones(LONG_NBYTES, dtype=np.uint8)
        self._own = own

    def send(self, nbytes: int) -> None:
        self._room[:nbytes] = self._memory[:nbytes]
        self._counters[self._own] += 1

    def receive(self, message: int, nbytes: int) -> None:
        patience = SpinThenSleep(_LONGEST_WAIT_S)
        while self._counters[1 - self._own] < message:
            if not patience.pause():
                raise RunFailed("shared memory could not be measured: its second process did not answer; try again")
        self._memory[:nbytes] = self._room[:nbytes]


def _ask(side: _Side) -> tuple[float, float]:
    """Seconds of a short and of a long message, one way; each the median of many."""
    times: dict[int, list[float]] = {_SHORT_NBYTES: [], LONG_NBYTES: []}
    for message, nbytes in enumerate(_MESSAGES, start=1):
        start = time.perf_counter()
        side.send(nbytes)
        side.receive(message, nbytes)
        times[nbytes].append((time.perf_counter() - start) / 2)
    return statistics.median(times[_SHORT_NBYTES]), statistics.median(times[LONG_NBYTES])


def _answer(path: str) -> None:
    """The other process: gives back every message."""
    die_with_parent()
    side = _Side(path, own=1)
    for message, nbytes in enumerate(_MESSAGES, start=1):
        side.receive(message, nbytes)
        side.send(nbytes)
