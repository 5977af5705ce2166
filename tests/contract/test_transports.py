"""Every transport x every promise; the in-memory one, on which contracts are checked, is as strict as the real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from collectives.transport.base import Transport, TransportError, wait_all
from collectives.transport.rendezvous import connect_all
from collectives.transport.sockets import Connection, Connections, SocketTransport
from tests.testing.limits import LIMIT_S
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads

T = TypeVar("T")
RING_BYTES = 4096
LONG = 1_500_000
"""Floats that do not fit into the kernel's buffers of both ends."""


def over_sockets(fn: Callable[[SocketTransport], T], world_size: int, timeout_s: float = LIMIT_S) -> list[T]:
    """Return the results of `fn` on every rank; ranks are threads with socket connections."""
    store = HashStore()

    def run(backend: MemoryTransport) -> T:
        sockets = connect_all(store, backend.rank, world_size, "127.0.0.1", LIMIT_S)
        connections = {peer: Connection(sock) for peer, sock in sockets.items()}
        transport = SocketTransport(Connections(backend, connections), backend)
        try:
            return fn(transport)
        finally:
            transport.close()

    return run_threads(run, world_size, timeout_s)


TRANSPORTS: dict[str, Callable[..., list[Any]]] = {
    "memory": run_threads,
    "sockets": over_sockets,
}
EACH = pytest.mark.parametrize("over", TRANSPORTS.values(), ids=TRANSPORTS)


@EACH
def test_messages_of_every_length_arrive_in_order_and_are_counted_by_purpose(over: Callable[..., list[Any]]) -> None:
    lengths = [1, 0, 70_000, 3, 200_001, 0, 5]

    def exchange(transport: Transport) -> list[tuple[int, int, bool]]:
        peer = 1 - transport.rank
        sent = [torch.full((length,), index, dtype=torch.uint8) for index, length in enumerate(lengths)]
        wait = transport.send_receive([(message, peer) for message in sent], [(10**6, peer) for _ in sent])
        for came, message in zip(wait(), sent, strict=True):  # sockets know the length of a message
            assert torch.equal(came if isinstance(transport, SocketTransport) else came[: len(message)], message)
        room = torch.empty(1)
        with transport.counted_as("control"):
            wait_all(transport.post([(torch.full((1,), 7.0), peer)], [(room, peer)]))
        assert room.item() == 7
        transport.barrier()
        transport.start_all_reduce_(torch.ones(4)).wait()
        counted = transport.traffic
        assert counted["gradient"].seconds > 0
        return [(counted[p].messages, counted[p].nbytes, counted[p].from_formula) for p in ("gradient", "control")]

    for gradient, control in over(exchange, 2):
        assert gradient == (len(lengths) + 1, sum(lengths) + 16, True)
        assert control[:2] == (2, 4 + 8)  # a barrier is a sum of one fp64


@EACH
def test_long_messages_go_round_a_circle_and_across_in_whatever_order_they_are_waited_for(
    over: Callable[..., list[Any]],
) -> None:
    def exchange(transport: Transport) -> list[float]:
        mine = torch.full((LONG,), float(transport.rank))
        others = [other for other in range(3) if other != transport.rank]
        rooms = [torch.empty_like(mine) for _ in others]
        pendings = transport.post([(mine, other) for other in others], list(zip(rooms, others, strict=True)))
        wait_all([*reversed(pendings), *pendings])  # sends first: they must complete without a wait for the receives
        assert all(bool((room == room[0]).all()) for room in rooms)
        return [float(room[0]) for room in rooms]

    assert over(exchange, 3) == [[1.0, 2.0], [0.0, 2.0], [0.0, 1.0]]


@EACH
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_views_number_their_ranks_anew_and_share_the_ledger(over: Callable[..., list[Any]], world_size: int) -> None:
    def rank(whole: Transport) -> None:
        part = whole.view([rank for rank in reversed(range(world_size)) if rank % 2 == whole.rank % 2])
        assert part.names[part.rank] == whole.rank
        assert part.traffic is whole.traffic
        x = torch.arange(1001.0) + whole.rank
        part.start_all_reduce_(x).wait()
        assert torch.equal(x, sum((torch.arange(1001.0) + member for member in part.names), torch.zeros(1001)))
        assert part.traffic["gradient"].nbytes == round(2 * (len(part.names) - 1) / len(part.names) * 4004)
        assert part.all_reduce_scalars([whole.rank, -whole.rank], "max") == [max(part.names), -min(part.names)]
        assert whole.all_reduce_scalars([whole.rank, -whole.rank]) == [world_size - 1, 0.0]
        whole.barrier()

    over(rank, world_size)


@EACH
def test_a_wait_is_bounded_and_names_the_peer_as_users_do(over: Callable[..., list[Any]]) -> None:
    def rank(whole: Transport) -> None:
        if whole.rank == 1:
            with pytest.raises(TransportError, match="rank 1 waited for rank 2, which did not answer") as caught:
                whole.view([2, 1]).receive_into(torch.zeros(1), 0).wait()
            assert caught.value.lost_rank == 2
            assert "rank 1 waited for rank 2" in str(whole.view([2, 1]).timeout_error(0))

    over(rank, 3, timeout_s=0.5)


def test_a_buffer_too_short_for_its_message_is_an_error() -> None:
    wires = MemoryWires(2)
    wires.transport(0).send(torch.zeros(3), 1)
    with pytest.raises(TransportError, match="posted 8 bytes for a message of 12 bytes"):
        wires.transport(1).receive_into(torch.zeros(2), 0)


def test_in_memory_a_tensor_changed_before_it_was_received_arrives_changed() -> None:
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


def test_in_memory_the_rank_that_failed_first_is_the_one_reported_and_nobody_waits_for_it() -> None:
    def rank(transport: MemoryTransport) -> None:
        if transport.rank == 1:
            raise ValueError("the cause")
        transport.barrier()

    with pytest.raises(RuntimeError, match=r"rank 1:\n(.|\n)*ValueError: the cause"):
        run_threads(rank, 3, timeout_s=60.0)
