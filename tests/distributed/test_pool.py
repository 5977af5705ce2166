"""The pool: many successive sums in real processes."""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import pytest
import torch

from collectives.payloads import Dense
from collectives.payloads.base import Payload
from collectives.pool import Pool
from collectives.transport.base import ReduceOp
from collectives.transport.messages import sum_wires
from collectives.transport.process_group import ProcessGroupTransport
from tests.testing.limits import LIMIT_S
from tests.testing.payloads import packed_codes
from tests.testing.ranks import run_ranks

NUM_CALLS = 1000
WORLD_SIZE = 3


def contribution(call: int, rank: int) -> Payload:
    """Return integers, whose sum is exact in any order; lengths are near that of a slot, and one kind is gathered."""
    rng = random.Random(call)
    generator = torch.Generator().manual_seed(WORLD_SIZE * call + rank)
    if call % 5 == 4:
        codes = torch.randint(0, 16, (rng.choice([0, 1, 50, 20_000]),), generator=generator)
        return packed_codes(codes, codebook="levels", bits=4, scales=torch.ones(min(1, codes.numel())))
    dtype = rng.choice([torch.float32, torch.float16, torch.int64])
    return Dense(torch.randint(-9, 9, (rng.choice([0, 1, 2, 1023, 1024, 1025, 5000]),), generator=generator).to(dtype))


def sum_in_a_row(rank: int, folder: str) -> list[int]:
    """Return the numbers of the calls whose result was wrong."""
    rng = random.Random(1000 + rank)
    pool = Pool(path=(folder,), slot_bytes=4096).bind(ProcessGroupTransport(timeout_s=LIMIT_S))
    wrong = []
    for call in range(NUM_CALLS):
        if rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        total = pool.sum(contribution(call, rank), (0,)).to_dense()
        expected = sum(contribution(call, other).to_dense() for other in range(WORLD_SIZE))
        if not torch.equal(total, torch.as_tensor(expected)):
            wrong.append(call)
    pool.close()
    return wrong


@pytest.mark.parametrize("folder", ["memory", pytest.param("plain files", marks=pytest.mark.long)])
def test_many_sums_in_a_row(folder: str, tmp_path: Path, in_memory: Path) -> None:
    place = in_memory if folder == "memory" else tmp_path / "region"
    place.mkdir(exist_ok=True)
    assert run_ranks(sum_in_a_row, WORLD_SIZE, tmp_path, args=(str(place),)) == [[]] * WORLD_SIZE
    assert not list(place.iterdir())


def buffers_in_a_row(rank: int, folder: str) -> list[int]:
    """Return the calls with wrong results; gradients are in the pool, and are overwritten right after each sum."""
    rng = random.Random(2000 + rank)
    bound = Pool(path=(folder,), slot_bytes=4096, regions=2).bind(ProcessGroupTransport(timeout_s=LIMIT_S))
    dtypes = (torch.float32, torch.float16)
    buffers = [bound.buffer(numel, dtype) for numel in (1, 1023, 5000) for dtype in dtypes]
    wrong = []
    for call in range(NUM_CALLS):
        buffer = buffers[random.Random(call).randrange(len(buffers))]
        generators = [torch.Generator().manual_seed(WORLD_SIZE * call + other) for other in range(WORLD_SIZE)]
        rows = [torch.randn(buffer.numel(), generator=generator).to(buffer.dtype) for generator in generators]
        buffer.copy_(rows[rank])
        if rng.random() < 0.1:
            time.sleep(rng.random() * 2e-3)
        if call % 3 == 0:
            bound.sum(Dense(rows[rank].clone()), (0,))
        total = bound.sum(Dense(buffer), (0,)).wire
        if total.data_ptr() != buffer.data_ptr() or not torch.equal(buffer, sum_wires(rows)):
            wrong.append(call)
        buffer.fill_(torch.nan)
    bound.close()
    return wrong


@pytest.mark.long
def test_many_sums_of_gradients_that_lie_in_the_pool(tmp_path: Path) -> None:
    assert run_ranks(buffers_in_a_row, WORLD_SIZE, tmp_path, args=("/dev/shm",)) == [[]] * WORLD_SIZE


def sum_every_kind(rank: int, world_size: int, folder: str) -> list[str]:
    """Return the sums that differ from the serial sum in rank order."""
    pools = [
        Pool(path=("/dev/shm",)).bind(ProcessGroupTransport(timeout_s=LIMIT_S)),
        Pool(path=("/dev/shm", folder, "/dev/shm"), regions=3).bind(ProcessGroupTransport(timeout_s=LIMIT_S)),
    ]
    shapes = [(numel, torch.float32) for numel in (0, 1, world_size - 1, world_size, world_size + 1, 10**6)]
    shapes += [(1001, dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64)]
    ops: tuple[ReduceOp, ...] = ("sum", "max")
    wrong = []
    for numel, dtype in shapes:
        generators = [torch.Generator().manual_seed(numel + other) for other in range(world_size)]
        rows = [(9 * torch.randn(numel, generator=generator)).to(dtype) for generator in generators]
        expected = {op: sum_wires(rows, op) for op in ops}
        values, buffer = torch.empty(numel, dtype=dtype), pools[1].buffer(numel, dtype)
        for (pool, tensor), op in itertools.product([(pools[0], values), (pools[1], values), (pools[1], buffer)], ops):
            tensor.copy_(rows[rank])
            if not torch.equal(pool.sum(Dense(tensor), (0,), op).wire, expected[op]):
                wrong.append(f"{numel} {dtype} {op}")
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_sums_are_the_serial_ones_bit_for_bit(world_size: int, tmp_path: Path) -> None:
    assert run_ranks(sum_every_kind, world_size, tmp_path, args=(world_size, str(tmp_path))) == [[]] * world_size
