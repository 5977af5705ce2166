"""What a message costs the rank that sends or receives it: CPU time of two processes that exchange some as ranks do."""

from __future__ import annotations

import time

import torch

from collectives.transport.base import Transport, wait_all
from collectives.transport.sockets import open_transport

SIZES = (1_000, 1_000_000)
MESSAGES = 40
TURNS = 25
"""of which the least counts: what waking a process costs varies a hundredfold with what else the machine does"""


def message_costs(timeout_s: float) -> tuple[float, float]:
    """(seconds of work for one message, for one byte), sent or received; whatever threads it takes are in it.

    Both of two ranks must call, in a process group of theirs.
    """
    transport = open_transport(timeout_s=timeout_s)
    turns = [[_one(transport, nbytes) for nbytes in SIZES] for _ in range(TURNS)]
    transport.close()
    (short, long), (short_s, long_s) = SIZES, map(min, zip(*turns, strict=True))
    byte_s = max(0.0, (long_s - short_s) / (long - short))
    return max(0.0, short_s - byte_s * short), byte_s


def _one(transport: Transport, nbytes: int) -> float:
    """CPU seconds of this process for one message, sent or received."""
    other = 1 - transport.rank
    mine, theirs = torch.zeros(2, nbytes, dtype=torch.uint8)
    started = time.process_time()
    for _ in range(MESSAGES):
        wait_all(transport.post([(mine, other)], [(theirs, other)]))
    return (time.process_time() - started) / (2 * MESSAGES)
