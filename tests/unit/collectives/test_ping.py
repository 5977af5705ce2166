"""Ping servers: a running process answers, an ended one is refused, and an unreachable machine is neither."""

from __future__ import annotations

import errno
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from collectives.transport.failure_detector import PingServer, own_host, ping_all


def test_who_runs_answers_who_is_gone_or_stopped_does_not_and_a_lost_machine_is_left_out() -> None:
    running = PingServer("127.0.0.1")
    with (
        socket.create_server(("127.0.0.1", 0)) as stopped,
        socket.create_server(("127.0.0.1", 0)) as gone,
        socket.create_server(("127.0.0.1", 0), backlog=0) as lost,
    ):
        closed = gone.getsockname()
        gone.close()
        with socket.create_connection(lost.getsockname()):  # its queue is full, so it drops packets like a dead link
            addresses = {0: running.address, 1: stopped.getsockname(), 2: closed, 3: lost.getsockname()}
            assert ping_all(addresses, within_s=0.4) == {0: True, 1: False, 2: False}
    running.close()


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_closed_ping_server_refuses_and_leaves_neither_thread_nor_socket() -> None:
    before, files = set(threading.enumerate()), num_files()
    ping_server = PingServer("127.0.0.1")
    (thread,) = set(threading.enumerate()) - before
    assert ping_all({0: ping_server.address}, within_s=2) == {0: True}
    ping_server.close()
    assert ping_all({0: ping_server.address}, within_s=2) == {0: False}
    thread.join()
    assert not thread.is_alive()
    assert num_files() == files


def test_it_answers_again_after_the_process_ran_out_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def accept_later(server: socket.socket) -> Any:
        if failures:
            raise failures.pop()
        return accept(server)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    ping_server = PingServer("127.0.0.1")
    assert ping_all({0: ping_server.address}, within_s=4) == {0: True}
    assert not failures
    ping_server.close()


def test_a_rank_is_found_where_it_meets_the_others() -> None:
    assert own_host("127.0.0.1") == "127.0.0.1"


def test_a_rank_without_a_way_to_the_others_is_found_on_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert own_host("nowhere") == "127.0.0.1"
