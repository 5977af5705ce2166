"""What a message costs the rank that sends or receives it: CPU time of two processes that exchange some over gloo."""

from __future__ import annotations

import statistics
import time

import torch

from collectives.transport.base import wait_all
from collectives.transport.process_group import ProcessGroupTransport

SIZES = (1_000, 1_000_000)
MESSAGES = 40
TURNS = 5


def message_costs(timeout_s: float) -> tuple[float, float]:
    """(seconds of work for one message, for one byte), sent or received; the backend's own threads are in it.

    Both of two ranks must call, in a process group of theirs.
    """
    transport = ProcessGroupTransport(timeout_s=timeout_s)
    other = 1 - transport.rank
    (short, short_s), (long, long_s) = ((nbytes, _one(transport, other, nbytes)) for nbytes in SIZES)
    byte_s = max(0.0, (long_s - short_s) / (long - short))
    return max(0.0, short_s - byte_s * short), byte_s


def _one(transport: ProcessGroupTransport, other: int, nbytes: int) -> float:
    """CPU seconds of this process for one message, sent or received: median over turns."""
    mine, theirs = torch.zeros(2, nbytes, dtype=torch.uint8)
    turns = []
    for _ in range(TURNS):
        started = time.process_time()
        for _ in range(MESSAGES):
            wait_all(transport.post([(mine, other)], [(theirs, other)]))
        turns.append((time.process_time() - started) / (2 * MESSAGES))
    return statistics.median(turns)
