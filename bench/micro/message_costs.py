"""What a message costs beside its time on the link: CPU time of two ranks that exchange some, and of its carriers."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time

import psutil
import torch

from bench.core.parts import MessageCosts
from collectives.transport.base import Transport, wait_all

SHORT_BYTES, LONG_BYTES = 1_000, 1_000_000
SHORT_MESSAGES = 40
SHORT_TURNS = 25
"""of which the least counts: what waking a process costs varies a hundredfold with what else the machine does"""
LONG_TURNS = 7
REST_S = 0.25
CARRYING_S = 0.5
"""that a turn takes at least, in which what all processors do is told in hundredths of a second"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Turn:
    """Seconds for one message each way: of the clock, and of this process's CPU."""

    wall_s: float
    cpu_s: float


def message_costs(transport: Transport, long_messages: int) -> MessageCosts:
    """Costs on the way that the transport's messages go; both of two ranks must call.

    Args:
        transport: of two ranks.
        long_messages: of a megabyte, in each turn.
    """
    short = [_turn(transport, SHORT_BYTES, SHORT_MESSAGES) for _ in range(SHORT_TURNS)]
    long = [_turn(transport, LONG_BYTES, long_messages) for _ in range(LONG_TURNS)]
    short_s, long_s = (min(turn.cpu_s for turn in turns) / 2 for turns in (short, long))
    byte_s = max(0.0, (long_s - short_s) / (LONG_BYTES - SHORT_BYTES))
    message_s = max(0.0, short_s - byte_s * SHORT_BYTES)
    waited_s = min(turn.wall_s - turn.cpu_s for turn in short)
    return MessageCosts(message_s=message_s, byte_s=byte_s, wake_s=max(0.0, waited_s))


def carry_byte_s(transport: Transport) -> float:
    """CPU seconds of the whole machine for a byte between two virtual hosts, beside those of the ranks themselves.

    The kernel does much of it between processes, on the account of none. What the machine does anyway is looked at
    before each turn, and taken off. Both of two ranks must call.
    """
    alone_s = _turn(transport, LONG_BYTES, 1).wall_s
    (slowest_s,) = transport.all_reduce_scalars([alone_s], "max")
    long_messages = math.ceil(CARRYING_S / slowest_s)
    found = []
    for _ in range(LONG_TURNS):
        anyway = _busy_share()
        transport.barrier()
        busy, started = _busy_s(), time.perf_counter()
        turn = _turn(transport, LONG_BYTES, long_messages)
        (own_s,) = transport.all_reduce_scalars([turn.cpu_s * long_messages], "sum")
        wall_s = time.perf_counter() - started
        carried_s = _busy_s() - busy - own_s - anyway * wall_s
        found.append(carried_s / (2 * long_messages * LONG_BYTES))
    return max(0.0, statistics.median(found))


def _turn(transport: Transport, nbytes: int, messages: int) -> _Turn:
    other = 1 - transport.rank
    mine, theirs = torch.zeros(2, nbytes, dtype=torch.uint8)
    started, cpu = time.perf_counter(), time.process_time()
    for _ in range(messages):
        wait_all(transport.post([(mine, other)], [(theirs, other)]))
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    return _Turn(wall_s=wall_s / messages, cpu_s=cpu_s / messages)


def _busy_share() -> float:
    before, started = _busy_s(), time.perf_counter()
    time.sleep(REST_S)
    return (_busy_s() - before) / (time.perf_counter() - started)


def _busy_s() -> float:
    """Seconds for which processors were busy since the machine started, all together, in steps of 10 ms."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))
