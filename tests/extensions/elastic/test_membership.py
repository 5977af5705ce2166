"""The messages by which rank 0 decides who takes part: ranks that are late, that do not read, or that are strangers."""

from __future__ import annotations

import json
import socket
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bench.extensions.elastic.channel import Channel
from bench.extensions.elastic.coordinator import MOST_ATTEMPTS, Coordinator, _Peer
from bench.extensions.elastic.membership import COORDINATOR_KEY, Member, Rendezvous
from collectives.transport.base import Ledger, MembershipError, TransportError
from tests.extensions.elastic.quorum import QuorumRank, QuorumRun, lower, outers
from tests.testing.limits import LIMIT_S
from tests.testing.local_steps import Scalars


def member(sock: socket.socket) -> Member:
    """Return rank 1, which has joined over a connected socket."""
    rendezvous = Rendezvous(rank=1, world_size=2, store=HashStore(), host="127.0.0.1", digest="run", timeout_s=0.05)
    made = Member(rendezvous, Ledger())
    made._channel = Channel(sock, Ledger(), is_trusted=True, send_s=rendezvous.timeout_s)
    return made


def connected() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


def test_a_rank_whose_messages_nobody_takes_ends_and_sends_no_part_of_one() -> None:
    one, other = connected()
    with one, other:
        rank = member(one)
        with pytest.raises(TransportError, match="rank 1 lost rank 0"):
            rank.share_figures(1, {"index_sets": "x" * 100_000_000}, 1)
        assert one.fileno() == -1


def test_the_kernel_gives_up_on_bytes_that_are_not_acknowledged() -> None:
    one, other = connected()
    with one, other:
        Channel(one, Ledger(), is_trusted=True, send_s=90.0)
        Channel(other, Ledger(), is_trusted=True, send_s=90.0, stall_s=1.0)
        if name := getattr(socket, "TCP_USER_TIMEOUT", None):
            assert [sock.getsockopt(socket.IPPROTO_TCP, name) for sock in (one, other)] == [90_000, 60_000]


@pytest.mark.parametrize("kind", ["state", "end", "refused", "left_out", None])
def test_another_program_at_the_address_of_rank_0_is_not_believed(kind: str | None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        rendezvous = Rendezvous(
            rank=1, world_size=2, store=HashStore(), host="127.0.0.1", digest="run", timeout_s=LIMIT_S
        )
        rendezvous.store.set(COORDINATOR_KEY, json.dumps([*listener.getsockname(), "token", "answer"]))

        def answer() -> None:
            sock, _ = listener.accept()
            channel = Channel(sock, Ledger(), is_trusted=True, send_s=5.0)
            channel.receive()
            if kind is None:
                sock.sendall(_frame(b"no message"))
            else:
                channel.send(kind, answer="another", why="it says so")
            channel.close()

        other = threading.Thread(target=answer)
        other.start()
        rank = Member(rendezvous, Ledger())
        with pytest.raises(TransportError, match="rank 1 lost rank 0"):
            rank.join()
        rank.disconnect()
        other.join()


def test_a_rank_that_came_while_rank_0_was_busy_is_not_late() -> None:
    run = QuorumRun(3, deadline=1e-9)
    is_ready = [threading.Event() for _ in range(3)]

    def work(rank: QuorumRank) -> list[float]:
        send = getattr(rank.members.membership, "_send", None)

        def tell(kind: str, **values: Any) -> None:
            assert send is not None
            send(kind, **values)
            is_ready[rank.rank].set()

        if rank.rank > 0:
            vars(rank.members.membership)["_send"] = tell
        else:
            assert all(event.wait() for event in is_ready[1:])
        return outers(rank, 1)

    for rank in range(3):
        run.start(rank, Scalars(0.0), work)
    assert run.join() == {rank: [-7.0] for rank in range(3)}


def test_a_late_rank_is_left_out_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    run = QuorumRun(3, deadline=60.0, quorum=2)
    others_went_on = threading.Event()

    def work(rank: QuorumRank) -> list[float]:
        rank.step(lower)
        rank.rendezvous.deadline_s = 0.01
        if rank.rank == 2:
            others_went_on.wait()
        found = outers(rank, 2)
        if rank.rank == 0:
            others_went_on.set()
        return found

    for rank in range(3):
        run.start(rank, Scalars(0.0), work)
    results = run.join()
    assert isinstance(results[2], MembershipError)
    assert str(results[2]) == "exchange 1 goes on without rank 2, which was late for it (deadline=0.01)"
    assert results[0] == results[1] == pytest.approx([-9.5, -12.0])
    assert str(results[2]) in capsys.readouterr().err


def test_below_the_quorum_all_wait_for_a_rank_to_return_and_the_launcher_hears() -> None:
    run = QuorumRun(2, quorum=2)
    is_waiting = threading.Event()
    run.while_waiting = is_waiting.set

    def work(rank: QuorumRank) -> list[float]:
        if rank.rank == 1 and rank.first_step == 0:
            rank.kill_in(1, "during")
        return outers(rank, 3 - rank.first_step)

    run.start(0, Scalars(0.0), work)
    run.start(1, Scalars(0.0), work)
    run._threads[1].join()
    is_waiting.clear()
    assert is_waiting.wait()
    run.start(1, Scalars(0.0), work)
    assert run.join() == {0: [-2.5, -5.0, -7.5], 1: [-5.0, -7.5]}


def test_a_rank_that_fails_in_every_sum_ends_the_run() -> None:
    run = QuorumRun(2, quorum=2)

    def work(rank: QuorumRank) -> None:
        if rank.rank == 1:
            rank.kill_in(1, "during")
        outers(rank)

    for rank in range(2):
        run.start(rank, Scalars(0.0), work)
    for _ in range(MOST_ATTEMPTS - 1):
        run._threads[-1].join()
        run.start(1, Scalars(0.0), work)
    (error,) = run.join().values()
    assert isinstance(error, MembershipError)
    assert str(error) == "exchange 1 has failed 8 times; the last time, rank 0 lost rank 1, or waited in vain for it"


def test_without_a_quorum_in_time_the_run_fails_and_names_the_ranks() -> None:
    run = QuorumRun(3, quorum=3, timeout_s=4.0)

    def work(rank: QuorumRank) -> None:
        if rank.rank > 0:
            rank.kill_in(1, "before")
        outers(rank)

    for rank in range(3):
        run.start(rank, Scalars(0.0), work)
    (error,) = run.join().values()
    assert str(error) == (
        "exchange 1 needs 3 ranks (quorum), and rank 1 and rank 2 did not come within 4 s (--timeout)"
    )


def test_ranks_that_do_not_start_are_named() -> None:
    run = QuorumRun(3, timeout_s=0.5)
    run.start(0, Scalars(0.0), outers)
    assert str(run.join()[0]) == "rank 1 and rank 2 did not join within 0.5 s (--timeout)"


def test_the_run_ends_with_rank_0() -> None:
    run = QuorumRun(2)

    def work(rank: QuorumRank) -> None:
        if rank.rank == 0:
            rank.kill_in(1, "after")
        outers(rank)

    for rank in range(2):
        run.start(rank, Scalars(0.0), work)
    (error,) = run.join().values()
    assert isinstance(error, TransportError)
    assert str(error).startswith("rank 1 lost rank 0, which decides who takes part in exchanges")


def test_a_rank_that_hangs_in_a_sum_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.extensions.elastic.coordinator.REPORTS_S", 1.0)
    monkeypatch.setattr("bench.extensions.elastic.coordinator.FAREWELL_S", 0.1)
    run = QuorumRun(3)
    ends = threading.Event()

    def work(rank: QuorumRank) -> list[float]:
        reduce = rank.local.reducer.reduce

        def hang_or_wait_briefly(*given: Any) -> None:
            rank.local.reducer.reduce = reduce
            if rank.rank == 2:
                ends.wait()
            rank.local.transport._backend.timeout_s = 1.0
            reduce(*given)

        rank.local.reducer.reduce = hang_or_wait_briefly
        return outers(rank, 2)

    for rank in range(3):
        run.start(rank, Scalars(0.0), work)
    for thread in run._threads[:2]:
        thread.join()
    ends.set()
    assert run.results[0] == run.results[1] == pytest.approx([-2.5, -5.0])


def test_a_rank_that_says_nothing_after_a_failed_sum_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.extensions.elastic.coordinator.REPORTS_S", 0.5)
    monkeypatch.setattr("bench.extensions.elastic.coordinator.FAREWELL_S", 0.1)
    run = QuorumRun(3)
    ends = threading.Event()

    def work(rank: QuorumRank) -> list[float]:
        if rank.rank == 1:
            rank.fail_once_in(0)
        if rank.rank == 2:
            rank.members.membership.agree = lambda _: ends.wait()
        return outers(rank, 2)

    started = time.monotonic()
    for rank in range(3):
        run.start(rank, Scalars(0.0), work)
    for thread in run._threads[:2]:
        thread.join()
    assert time.monotonic() - started < run.timeout_s / 2
    ends.set()
    assert run.results[0] == run.results[1] == pytest.approx([-2.5, -5.0])


def test_strangers_are_sent_away() -> None:
    run = QuorumRun(2)

    def work(rank: QuorumRank) -> list[float]:
        strangers = []
        if rank.rank == 0:
            host, port, *_ = json.loads(run.store.get(COORDINATOR_KEY))
            texts = [b"GET / HTTP/1.1\r\n\r\n" * 99, b"\0" * 12, _frame(b"[" * 3000), _frame(b'{"kind": "hello"}')]
            texts.append(_frame(b'{"kind": "hello", "rank": 1, "digest": "run", "token": "\xc3\xa9"}'))
            for text in texts:
                strangers.append(socket.create_connection((host, port)))
                strangers[-1].sendall(text)
        found = outers(rank, 2)
        assert all(map(_ends, strangers))
        return found

    for rank in range(2):
        run.start(rank, Scalars(0.0), work)
    assert run.join() == {0: [-2.5, -5.0], 1: [-2.5, -5.0]}


def _frame(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + bytes(8) + text


def _ends(sock: socket.socket) -> bool:
    with sock:
        try:
            return not sock.recv(1)
        except ConnectionResetError:
            return True


def test_a_rank_of_another_run_is_told_so() -> None:
    run = QuorumRun(2, timeout_s=2.0)
    run.start(0, Scalars(0.0), outers)
    run.start(1, Scalars(0.0), outers, digest="another")
    results = run.join()
    assert str(results[1]) == (
        "rank 1 belongs to another run than rank 0: the machines have different options or data; use the same command "
        "on each"
    )


def test_a_rank_that_is_admitted_below_the_quorum_gets_the_whole_timeout_for_its_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr("bench.extensions.elastic.coordinator.time", SimpleNamespace(monotonic=lambda: now))
    rendezvous = Rendezvous(
        rank=0, world_size=2, store=HashStore(), host="127.0.0.1", digest="run", timeout_s=10.0, quorum=2
    )
    coordinator = Coordinator(rendezvous, Ledger(), state=lambda _: b"", while_waiting=lambda: None)
    peer = _Peer(channel=Mock(), rank=1)
    coordinator._peers.append(peer)

    def poll(limit: float) -> bool:
        nonlocal now
        if limit:
            now += 4.0
            if peer.status == "stranger":
                peer.status = "waiting"
            elif now > 12.0:
                peer.ready = 0
        return False

    monkeypatch.setattr(coordinator, "_poll", poll)
    assert coordinator.begin(0, 0).ranks == [0, 1]
    assert now == 16.0
    coordinator._listener.close()
    coordinator._selector.close()
