"""What a message costs beside its time on the link: CPU time of two ranks that exchange some."""

from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from bench.extensions.predict.calibration import MessageCosts
from collectives.transport.base import Transport, wait_all

SHORT_BYTES, LONG_BYTES = 1_000, 1_000_000
SHORT_MESSAGES = 40
SHORT_TURNS = 25
LONG_TURNS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Turn:
    """Seconds for one message each way: of the clock, and of this process's CPU."""

    wall_s: float
    cpu_s: float


def message_costs(transport: Transport, long_messages: int) -> MessageCosts:
    """Costs on the way that the transport's messages go; the first two ranks must call.

    Args:
        transport: of these two, or more ranks.
        long_messages: of a megabyte, in each turn.
    """
    short = [_turn(transport, SHORT_BYTES, SHORT_MESSAGES) for _ in range(SHORT_TURNS)]
    long = [_turn(transport, LONG_BYTES, long_messages) for _ in range(LONG_TURNS)]
    short_s, long_s = (statistics.median(turn.cpu_s for turn in turns) / 2 for turns in (short, long))
    per_byte_s = max(0.0, (long_s - short_s) / (LONG_BYTES - SHORT_BYTES))
    message_s = max(0.0, short_s - per_byte_s * SHORT_BYTES)
    waited_s = statistics.median(turn.wall_s - turn.cpu_s for turn in short)
    return MessageCosts(message_s=message_s, per_byte_s=per_byte_s, wake_s=max(0.0, waited_s))


def _turn(transport: Transport, nbytes: int, messages: int) -> _Turn:
    other = 1 - transport.rank
    mine, theirs = torch.zeros(2, nbytes, dtype=torch.uint8)
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(messages):
        wait_all(transport.post([(mine, other)], [(theirs, other)]))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return _Turn(wall_s=wall_s / messages, cpu_s=cpu_s / messages)
