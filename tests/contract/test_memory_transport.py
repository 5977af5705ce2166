"""The in-memory transport is as strict as the real ones: it detects what they would turn into wrong sums or hangs."""

from __future__ import annotations

import threading

import pytest
import torch

from collectives.transport.base import TransportError, wait_all
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads


def test_messages_arrive_in_order_and_are_counted_by_purpose() -> None:
    def rank(transport: MemoryTransport) -> list[float]:
        other = 1 - transport.rank
        received = torch.zeros(3)
        sends = [transport.send(torch.tensor([float(i)]), other) for i in range(2)]
        with transport.counted_as("control"):
            sends.append(transport.send(torch.tensor([2.0]), other))
        wait_all([transport.receive_into(received[i : i + 1], other) for i in range(3)])
        wait_all(sends)
        assert (transport.traffic["gradient"].messages, transport.traffic["gradient"].nbytes) == (2, 8)
        assert (transport.traffic["control"].messages, transport.traffic["control"].nbytes) == (1, 4)
        return received.tolist()

    assert run_threads(rank, 2) == [[0.0, 1.0, 2.0]] * 2


def test_a_tensor_changed_before_it_was_received_arrives_changed() -> None:
    changed = threading.Event()

    def rank(transport: MemoryTransport) -> float:
        tensor = torch.tensor([1.0])
        if transport.rank == 0:
            pending = transport.send(tensor, 1)
            tensor.fill_(2.0)
            changed.set()
            pending.wait()
        else:
            changed.wait()
            transport.receive_into(tensor, 0).wait()
        return float(tensor)

    assert run_threads(rank, 2) == [2.0, 2.0]


def test_a_buffer_too_short_for_its_message_is_an_error() -> None:
    wires = MemoryWires(2)
    sender, receiver = wires.transport(0), wires.transport(1)
    sender.send(torch.zeros(3), 1)
    with pytest.raises(TransportError, match="posted 8 bytes for a message of 12 bytes"):
        receiver.receive_into(torch.zeros(2), 0)


def test_a_wait_is_bounded_and_names_the_peer() -> None:
    transport = MemoryWires(3, timeout_s=0.05).transport(1)
    with pytest.raises(TransportError, match="rank 1 waited for rank 2") as caught:
        transport.receive_into(torch.zeros(1), 2).wait()
    assert caught.value.lost_rank == 2


def test_the_rank_that_failed_first_is_the_one_reported_and_nobody_waits_for_it() -> None:
    def rank(transport: MemoryTransport) -> None:
        if transport.rank == 1:
            raise ValueError("the cause")
        transport.barrier()

    with pytest.raises(RuntimeError, match=r"rank 1:\n(.|\n)*ValueError: the cause"):
        run_threads(rank, 3, timeout_s=60.0)


def test_views_number_their_ranks_and_share_the_ledger() -> None:
    def rank(transport: MemoryTransport) -> list[float]:
        part = transport.view([r for r in range(5) if r % 2 == transport.rank % 2])
        assert part.names[part.rank] == transport.rank
        x = torch.tensor([float(transport.rank)])
        part.start_all_reduce_(x).wait()
        assert part.traffic is transport.traffic
        return [float(x), *part.all_reduce_scalars([transport.rank, -transport.rank], "max")]

    even, odd = [6.0, 4.0, 0.0], [4.0, 3.0, -1.0]
    assert run_threads(rank, 5) == [even, odd, even, odd, even]
