"""What carrying a byte between virtual hosts takes of the cores that their ranks share.

The kernel's own accounts do not tell: where it looks at every tick at what a core does, it misses what timers and
frames do between two of them. So it is found from what is missing to ranks that compute meanwhile, as in training.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Self

import torch

from bench.core import environment
from bench.core.counters import ForwarderUse
from bench.extensions.predict.calibration import MessageCosts
from collectives.transport.base import Transport, wait_all

MESSAGE_BYTES = 300_000
TURNS = 40
STRAY_SHARE = 0.2
"""of the turns at either end that do not count"""
REST_S = 0.1
ROWS = 128


class _Computing:
    """A context in which a thread multiplies small matrices, and counts."""

    def __enter__(self) -> Self:
        self._count, self._goes_on = 0, True
        self._thread = threading.Thread(target=self._compute, name="computing")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._goes_on = False
        self._thread.join()

    def per_s(self, work: Callable[[], object]) -> tuple[float, float]:
        """How fast it counts while other work is done, and the seconds that this takes."""
        before, started = self._count, time.perf_counter()
        work()
        seconds = time.perf_counter() - started
        return (self._count - before) / seconds, seconds

    def _compute(self) -> None:
        matrix, product = torch.ones(ROWS, ROWS), torch.empty(ROWS, ROWS)
        while self._goes_on:
            torch.mm(matrix, matrix, out=product)
            self._count += 1


def carry_byte_s(transport: Transport, costs: MessageCosts) -> float:
    """Seconds of a core for a byte, beside what `costs` say of the ranks that exchange it; every rank must call.

    Each turn is held against a rest before it, for cores are faster at one moment than at another. The mean counts:
    the same frames take several times as long where processes happen to lie on other cores.
    """
    n, cores, found = transport.world_size, environment.usable_cores(), []
    own_s = 2 * (costs.message_s + costs.per_byte_s * MESSAGE_BYTES)
    with _Computing() as computing:
        for _ in range(TURNS):
            transport.barrier()
            at_rest, _ = computing.per_s(lambda: time.sleep(REST_S))
            transport.barrier()
            beside, seconds = computing.per_s(lambda: _exchange(transport))
            at_rest, beside, seconds = transport.all_reduce_scalars([at_rest, beside, seconds], "sum")
            taken_s = cores * seconds / n * (1 - beside / at_rest)
            found.append((taken_s / (n * (n - 1)) - own_s) / MESSAGE_BYTES)
    stray = int(STRAY_SHARE * len(found))
    return max(0.0, statistics.fmean(sorted(found)[stray : len(found) - stray]))


def forwarded_byte_s(transport: Transport) -> float:
    """Seconds of the one thread that forwards all messages for a byte; every rank must call.

    Many frames are under way at once, as in training: what it takes for each grows with how many it holds.
    """
    n, use = transport.world_size, ForwarderUse()
    for _ in range(TURNS):
        transport.barrier()
        use.start()
        _exchange(transport)
        transport.barrier()
        use.stop()
    (cpu_s,) = transport.all_reduce_scalars([use.cpu_s], "sum")
    return cpu_s / n / (TURNS * n * (n - 1) * MESSAGE_BYTES)


def _exchange(transport: Transport) -> None:
    """One message from each rank to each."""
    others = [rank for rank in range(transport.world_size) if rank != transport.rank]
    mine, *theirs = torch.zeros(1 + len(others), MESSAGE_BYTES, dtype=torch.uint8)
    sends, receives = [(mine, other) for other in others], list(zip(theirs, others, strict=True))
    wait_all(transport.post(sends, receives))
