"""Messages through mapped memory between real processes: many in a row, of every length, and a killed rank."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from bench.extensions.place.shared_memory import PARTS_PER_RING, SharedMemoryTransport
from collectives.transport.base import TransportError, wait_all
from collectives.transport.process_group import ProcessGroupTransport
from tests.testing.limits import LIMIT_S
from tests.testing.ranks import run_ranks

RING_BYTES = 8192
PART = RING_BYTES // PARTS_PER_RING
LENGTHS = (0, 1, PART - 1, PART, PART + 1, 10 * PART)
NUM_MESSAGES = 1000
KILLED = 2


def message(number: int, source: int, to: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9 * number + 3 * source + to)
    nbytes = LENGTHS[int(torch.randint(len(LENGTHS), (), generator=generator))]
    return torch.randint(256, (nbytes,), generator=generator).to(torch.uint8)


def exchange(rank: int, world_size: int, folder: str) -> list[int]:
    """Return the numbers of wrong messages when all ranks send to all, with several messages in flight."""
    rng = random.Random(rank)
    opener = ProcessGroupTransport(timeout_s=LIMIT_S)
    transport = SharedMemoryTransport(opener, folder, ring_bytes=RING_BYTES)
    others = [other for other in range(world_size) if other != rank]
    wrong, number = [], 0
    while number < NUM_MESSAGES:
        count = random.Random(number).choice([1, 1, 1, 7])
        if rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        numbers = range(number, number + count)
        sends = [(message(i, rank, other), other) for i in numbers for other in others]
        buffers = [(torch.zeros(12 * PART, dtype=torch.uint8), other) for _ in numbers for other in others]
        pendings = transport.post(sends, buffers)
        rng.shuffle(pendings)
        wait_all(pendings)
        for i, (buffer, other) in zip([i for i in numbers for _ in others], buffers, strict=True):
            expected = message(i, other, rank)
            if not torch.equal(buffer[: len(expected)], expected) or buffer[len(expected) :].any():
                wrong.append(i)
        number += count
    return wrong


@pytest.mark.parametrize("world_size", [2, 3])
def test_many_messages_in_a_row(world_size: int, tmp_path: Path, in_memory: Path) -> None:
    assert run_ranks(exchange, world_size, tmp_path, args=(world_size, str(in_memory))) == [[]] * world_size


def lose_a_rank(rank: int) -> tuple[str, int | None]:
    transport = SharedMemoryTransport(ProcessGroupTransport(timeout_s=2.0), ring_bytes=RING_BYTES)
    transport.barrier()
    if rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError) as caught:
        transport.barrier()
    return str(caught.value), caught.value.lost_rank


def test_the_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    by_rank = run_ranks(lose_a_rank, 3, tmp_path, may_die=[KILLED])
    for rank in (0, 1):
        assert by_rank[rank] == (f"rank {rank} lost rank {KILLED}, which does not answer any more", KILLED)
