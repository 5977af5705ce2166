"""TCP connections: bells, broken connections, and strangers at a rank's address."""

from __future__ import annotations

import json
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from collectives.transport.base import TransportError, WakeupEvent, wait_all
from collectives.transport.rendezvous import connect_all, interface_host
from collectives.transport.sockets import Connection, Connections, SocketReceive, SocketTransport
from tests.contract.test_transports import over_sockets
from tests.testing.limits import LIMIT_S
from tests.testing.memory_transport import MemoryTransport, MemoryWires, run_threads

LONG = 6_000_000
"""Bytes that do not fit into the kernel's buffers of both ends."""
HOST = "127.0.0.1"


def pair(timeout_s: float = LIMIT_S) -> tuple[SocketTransport, socket.socket]:
    """Return the transport of rank 0 of two, and the raw other end of its connection."""
    here, there = tcp_pair()
    backend = MemoryWires(2, timeout_s).transport(0)
    return SocketTransport(Connections(backend, {1: Connection(here)}), backend), there


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server((HOST, 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    return here, there


def test_what_is_under_way_arrives_before_the_backend_takes_over() -> None:
    def exchange(transport: SocketTransport) -> float:
        peer = 1 - transport.rank
        sent, room, total = torch.ones(LONG, dtype=torch.uint8), torch.zeros(LONG, dtype=torch.uint8), torch.ones(1)
        incoming, outgoing = transport.post([(sent, peer)], [(room, peer)])
        if transport.rank == 0:
            incoming.wait()  # the other must receive this message before it enters the backend
        transport.start_all_reduce_(total).wait()
        wait_all([incoming, outgoing])
        return float(total) + float(room.min())

    assert over_sockets(exchange, 2) == [3.0, 3.0]


def test_the_kernel_says_nothing_before_a_message_is_complete() -> None:
    here, there = tcp_pair()
    here_end, message = Connection(here), SocketReceive(1, lambda *_: None, 1000)
    with there:
        here_end.incoming.append(message)
        there.sendall(struct.pack("<Q", 1000))
        assert is_readable(here_end)
        here_end.move(select.POLLIN)
        there.sendall(b"x" * 999)
        assert not is_readable(here_end)
        there.sendall(b"x")
        assert is_readable(here_end)
        here_end.move(select.POLLIN)
        assert message.is_done
        here_end.sock.close()


def is_readable(end: Connection) -> bool:
    poll = select.poll()
    poll.register(end.sock, end.events())
    return bool(poll.poll(0))


def test_a_bell_ends_waits_early_and_nothing_is_lost() -> None:
    interrupted = threading.Event()

    def exchange(transport: SocketTransport) -> torch.Tensor:
        buffer, bell = torch.zeros(1000), WakeupEvent()
        if transport.rank == 0:
            pending = transport.receive_into(buffer, 1)
            bell.ring()
            with transport.interrupted_by(bell):
                pending.wait()
            assert not buffer.any()
            interrupted.set()
            pending.wait()
        else:
            assert interrupted.wait()
            transport.send(torch.ones(1000), 0).wait()
        bell.close()
        return buffer

    assert over_sockets(exchange, 2)[0].all()


def test_a_wait_ends_if_a_bell_was_silenced_before_its_byte_came() -> None:
    transport, there = pair()
    with there:
        pending, bell = transport.receive_into(torch.empty(1), 1), WakeupEvent()
        bell.ring()
        bell.is_ringing = False  # as if `silence` had run in the middle of `ring`
        with transport.interrupted_by(bell):
            pending.wait()
        assert bell.is_ringing
        bell.close()
        transport.close()


def test_a_peer_that_closes_in_the_middle_of_a_message_is_missed_at_once() -> None:
    transport, there = pair()
    pending = transport.receive_into(torch.empty(10, dtype=torch.uint8), 1)
    there.sendall(struct.pack("<Q", 10) + b"half")
    there.close()
    with pytest.raises(TransportError, match="rank 0 waited for rank 1") as caught:
        pending.wait()
    assert caught.value.lost_rank == 1
    assert isinstance(caught.value.__cause__, ConnectionError)
    with pytest.raises(TransportError):
        transport.send(torch.ones(1), 1)


def test_a_wait_ends_in_time_names_whom_it_waited_for_and_hangs_up_on_all() -> None:
    transport, there = pair(timeout_s=0.05)
    with there:
        pending = transport.send(torch.ones(LONG), 1)
        with pytest.raises(TransportError, match="rank 1, which did not answer"):
            pending.wait()
        while there.recv(1 << 20):
            pass  # ends because this rank has closed the connection


def test_a_message_longer_than_the_room_for_it_is_refused() -> None:
    transport, there = pair()
    with there:
        there.sendall(struct.pack("<Q", 2**40))
        with pytest.raises(TransportError, match=f"rank 1 sent {2**40} bytes where this rank has room for 4"):
            transport.receive_into(torch.empty(1), 1).wait()


class WatchedStore:
    """A store that calls a stranger as soon as a rank has published its address."""

    def __init__(self, visit: Callable[[tuple[str, int], bytes], None]) -> None:
        self._store = HashStore()
        self._visit = visit

    def set(self, key: str, value: str) -> None:
        host, port, token = json.loads(value)
        self._visit((host, port), bytes.fromhex(token))
        self._store.set(key, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def test_strangers_are_hung_up_on_and_hold_nobody_up() -> None:
    strangers: list[socket.socket] = []

    def visit(address: tuple[str, int], token: bytes) -> None:
        guess = bytes(len(token))
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n", guess + b"\1\0\0\0", token + b"\x07\0\0\0", token + b"\1\0\0"):
            strangers.append(socket.create_connection(address))
            strangers[-1].sendall(said)

    store: Any = WatchedStore(visit)

    def run(backend: MemoryTransport) -> list[int]:
        met = connect_all(store, backend.rank, 3, HOST, LIMIT_S)
        for sock in met.values():
            sock.close()
        return sorted(met)

    assert run_threads(run, 3) == [[1, 2], [0, 2], [0, 1]]
    assert len(strangers) == 15
    for stranger in strangers:
        with stranger:
            assert is_hung_up_on(stranger)


def is_hung_up_on(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_answers_without_the_token_is_not_taken_for_a_rank() -> None:
    store = HashStore()
    with socket.create_server((HOST, 0)) as impostor:
        store.set("0", json.dumps([*impostor.getsockname(), "00" * 32]))

        def answer() -> None:
            sock, _ = impostor.accept()
            with sock:
                sock.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransportError, match="another program answers") as caught:
            connect_all(store, 1, 2, HOST, LIMIT_S)
        thread.join()
    assert caught.value.lost_rank == 0


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(TransportError) as caught:
        connect_all(HashStore(), 2, 3, HOST, 0.05)
    assert caught.value.lost_rank == 0
    store = HashStore()
    store.set("1", json.dumps([HOST, 9, "00" * 32]))  # it has published its address and does nothing more
    with pytest.raises(TransportError, match="it did not connect") as caught:
        connect_all(store, 0, 2, HOST, 0.05)
    assert caught.value.lost_rank == 1


def listening() -> set[str]:
    """Return the addresses on which this process accepts connections."""
    connections = psutil.Process().net_connections("tcp4")
    return {f"{each.laddr.ip}:{each.laddr.port}" for each in connections if each.status == psutil.CONN_LISTEN}


def test_a_rank_listens_where_it_is_told_and_only_until_all_have_met() -> None:
    seen: list[set[str]] = []
    store: Any = WatchedStore(lambda *_: seen.append(listening() - before))
    before = listening()

    def run(backend: MemoryTransport) -> None:
        for sock in connect_all(store, backend.rank, 2, HOST, LIMIT_S).values():
            sock.close()

    run_threads(run, 2)
    assert {address.partition(":")[0] for addresses in seen for address in addresses} == {HOST}
    assert listening() == before


def test_the_interface_that_gloo_would_use_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert interface_host(otherwise="10.0.0.9") == "127.0.0.1"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert interface_host(otherwise="10.0.0.9") == "10.0.0.9"


def test_a_bell_rings_however_often_and_by_whomever_it_was_rung_until_it_is_silenced() -> None:
    bell = WakeupEvent()
    assert not bell.is_ringing
    for rings in (1, 2, 100_000):
        for _ in range(rings):
            bell.ring()
        assert bell.is_ringing
        bell.silence()
        assert not bell.is_ringing
    bell.silence()
    ringer = threading.Thread(target=bell.ring)
    ringer.start()
    ringer.join()
    assert bell.is_ringing
    bell.close()
