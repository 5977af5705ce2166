"""Messages through mapped memory: every collective's sums equal those over any other transport, bit for bit."""

from __future__ import annotations

import pytest
import torch

from bench.extensions.place.shared_memory import SharedMemoryTransport
from collectives.transport.base import Transport, TransportError, wait_all
from tests.testing.collectives import COLLECTIVES, Result, assert_within_rounding, clone, key_of, refusal
from tests.testing.memory_transport import MemoryTransport, run_threads
from tests.testing.payloads import make

RING_BYTES = 4096
WORLD_SIZE = 4


def mapped(transport: Transport, coherent: bool | None = None) -> SharedMemoryTransport:
    return SharedMemoryTransport(transport, ring_bytes=RING_BYTES, coherent=coherent)


@pytest.mark.parametrize("kind", ["dense", "sparse", "codes-levels"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_sum_is_that_of_the_other_transports(name: str, kind: str) -> None:
    payloads = [make(kind, 5003, torch.float32, rank).payload for rank in range(WORLD_SIZE)]
    if refusal(COLLECTIVES[name](), payloads[0]):
        return

    def total(transport: Transport) -> Result:
        collective = COLLECTIVES[name]().bind(transport)
        summed = collective.sum(clone(payloads[transport.rank]), key_of(payloads[0]))
        collective.close()
        return summed.to_dense(), transport.traffic["gradient"].nbytes

    by_threads = run_threads(total, WORLD_SIZE)
    for (expected, nbytes), (found, found_nbytes) in zip(
        by_threads, run_threads(lambda transport: total(mapped(transport)), WORLD_SIZE), strict=True
    ):
        assert found_nbytes == nbytes
        if "native" in name:  # the backend chooses the order
            assert_within_rounding(found, payloads)
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("coherent", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_views_share_the_wires_and_the_ledger(world_size: int, coherent: bool) -> None:
    def rank(transport: MemoryTransport) -> None:
        whole = mapped(transport, coherent)
        part = whole.view([rank for rank in reversed(range(world_size)) if rank % 2 == whole.rank % 2])
        assert part.names[part.rank] == whole.rank
        assert part.traffic is whole.traffic
        members = list(part.names)
        x = torch.arange(1001.0) + whole.rank
        part.start_all_reduce_(x).wait()
        assert torch.equal(x, sum((torch.arange(1001.0) + member for member in members), torch.zeros(1001)))
        assert part.traffic["gradient"].nbytes == round(2 * (len(members) - 1) / len(members) * 4004)
        assert whole.all_reduce_scalars([whole.rank, -whole.rank]) == [world_size - 1, 0.0]
        whole.barrier()

    run_threads(rank, world_size)


def test_a_circle_of_long_messages_goes_round_in_whatever_order_it_is_waited_for() -> None:
    def rank(transport: MemoryTransport) -> float:
        x, y = torch.full((10 * RING_BYTES,), float(transport.rank)), torch.empty(10 * RING_BYTES)
        whole = mapped(transport)
        received, sent = whole.post([(x, (whole.rank + 1) % 3)], [(y, (whole.rank - 1) % 3)])
        wait_all([sent, received, sent])
        assert whole.traffic["gradient"].messages == 1
        return float(y.unique())

    assert run_threads(rank, 3) == [2.0, 0.0, 1.0]


def test_a_buffer_too_short_for_its_message_is_an_error() -> None:
    def rank(transport: MemoryTransport) -> None:
        whole = mapped(transport)
        if whole.rank == 0:
            whole.send(torch.zeros(3), 1).wait()
        else:
            with pytest.raises(TransportError, match="12 bytes from rank 0 does not fit into a buffer of 8 bytes"):
                whole.receive_into(torch.zeros(2), 0).wait()

    run_threads(rank, 2)


def test_a_wait_is_bounded_and_names_the_peer() -> None:
    def rank(transport: MemoryTransport) -> None:
        whole = mapped(transport)
        if whole.rank == 1:
            with pytest.raises(TransportError, match="rank 1 waited for rank 2") as caught:
                whole.receive_into(torch.zeros(1), 2).wait()
            assert caught.value.lost_rank == 2

    run_threads(rank, 3, timeout_s=0.5)
