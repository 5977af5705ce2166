"""Lost, late, unreachable or split ranks: ping servers, and conclusions from pings and from entries in the store."""

from __future__ import annotations

import errno
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from collectives.transport import failure_detector
from collectives.transport.failure_detector import Diagnosis, FailureDetector, PingServer, own_host, ping_all


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


def test_a_rank_is_found_where_it_meets_the_others_or_on_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror("Name or service not known")

    assert own_host("127.0.0.1") == "127.0.0.1"
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert own_host("nowhere") == "127.0.0.1"


HERE = "127.0.0.1"

Join = Callable[..., FailureDetector]
"""(store, rank) -> that rank's failure detector."""


@pytest.fixture
def join() -> Iterator[Join]:
    joined: list[FailureDetector] = []

    def join(store: Store, rank: int) -> FailureDetector:
        joined.append(FailureDetector(store, rank, HERE, grace_s=0.4))
        return joined[-1]

    yield join
    for detector in joined:
        detector.ping_server.close()


def announce(store: Store, rank: int, waited_for: int) -> None:
    """Write into the store what a rank writes whose wait has failed."""
    PrefixStore("gradwire/failure_detector", store).append("g/waits", f"[{rank}, {waited_for}]\n")


def test_a_running_rank_answers_and_an_ended_one_does_not(join: Join) -> None:
    store = HashStore()
    first, second = join(store, 0), join(store, 1)
    assert first.find_lost("g", [0, 1], 1) == Diagnosis(late=1)
    second.ping_server.close()
    assert first.find_lost("another", [0, 1], 1) == Diagnosis(lost=(1,))


def test_where_all_answer_and_nobody_was_waited_for_nobody_is_late(join: Join) -> None:
    store = HashStore()
    first, second = join(store, 0), join(store, 1)
    assert first.find_lost("g", [0, 1], None) == Diagnosis()
    assert second.find_lost("g", [0, 1], 0) == Diagnosis(late=0)


@pytest.mark.parametrize(
    ("waits", "late"),
    [({1: 2, 2: 3}, 3), ({}, 1), ({1: 2, 2: 0}, 2)],  # a chain; nobody else waits; a circle, of which one is named
)
def test_the_late_rank_is_the_last_of_those_that_wait_for_each_other(
    waits: dict[int, int], late: int, join: Join
) -> None:
    store = HashStore()
    detectors = [join(store, rank) for rank in range(4)]
    for rank, waited_for in waits.items():
        announce(store, rank, waited_for)
    assert detectors[0].find_lost("g", [0, 1, 2, 3], 1) == Diagnosis(late=late)


def test_whom_others_announce_a_little_later_still_counts(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 fail at the same time; rank 0 looks first."""
    store = HashStore()
    first, *_ = [join(store, rank) for rank in range(3)]
    monkeypatch.setattr(failure_detector.time, "sleep", lambda _: announce(store, 1, 2))
    assert first.find_lost("g", [0, 1, 2], 1) == Diagnosis(late=2)


def test_the_first_verdict_stands(join: Join) -> None:
    """Rank 0 finds rank 2 lost and leaves; rank 1 must not report rank 0 as the lost one."""
    store = HashStore()
    first, second = join(store, 0), join(store, 1)
    assert first.find_lost("g", [0, 1, 2], 2) == Diagnosis(lost=(2,))
    first.ping_server.close()
    assert second.find_lost("g", [0, 1, 2], 0) == Diagnosis(lost=(2,))


def test_who_is_late_stays_so_when_those_that_found_out_have_left(join: Join) -> None:
    """Rank 1 finds rank 2 late and leaves; rank 0, which waited for it, must not call it lost. Rank 2 sees both go."""
    store = HashStore()
    first, second, late = [join(store, rank) for rank in range(3)]
    assert second.find_lost("g", [0, 1, 2], 2) == Diagnosis(late=2)
    second.ping_server.close()
    assert first.find_lost("g", [0, 1, 2], 1) == Diagnosis(late=2)
    first.ping_server.close()
    assert late.find_lost("g", [0, 1, 2], 0) == Diagnosis(lost=(0, 1))


class FarStore:
    """A prefixed store with a delay of 20 ms per call."""

    def __init__(self, prefix: str, store: Store) -> None:
        self._store = PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(0.02)
            return getattr(self._store, name)(*arguments)

        return call


def test_round_trips_do_not_grow_with_the_number_of_ranks(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of ranks 0 to 62 waits for the next one; a round trip per rank would exceed the time limit."""
    store, num_ranks = HashStore(), 64
    detectors = [join(store, rank) for rank in range(num_ranks)]
    for rank in range(num_ranks - 1):
        announce(store, rank, rank + 1)
    monkeypatch.setattr(detectors[0], "_store", FarStore("gradwire/failure_detector", store))
    assert detectors[0].find_lost("g", range(num_ranks), 1) == Diagnosis(late=num_ranks - 1)


def test_a_rank_that_has_not_joined_is_lost_and_keeps_nobody_from_joining(join: Join) -> None:
    store = HashStore()
    first, second = join(store, 0), join(store, 1)
    first.publish(3)
    second.publish(3)
    assert first.find_lost("g", [0, 1], 1) == Diagnosis(late=1)
    assert first.find_lost("another", [0, 1, 2], 1) == Diagnosis(lost=(2,))


class UnreachableStore(HashStore):
    """A store as a rank sees it whose link is down: calls do not return until it `answers`."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def append(self, key: str, value: str) -> None:
        self.answers.wait()


def test_a_rank_that_can_ask_nobody_calls_nobody_lost(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    first = join(HashStore(), 0)
    store = UnreachableStore()
    monkeypatch.setattr(first, "_store", store)
    assert first.find_lost("g", [0, 1, 2], 1) is None
    store.answers.set()


class LostStore(HashStore):
    def append(self, key: str, value: str) -> None:
        raise RuntimeError("Connection refused")


@pytest.fixture
def ask(join: Join, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Diagnosis | None]:
    """Return a function that returns rank 0's diagnosis for every rank's machine (None: not joined) and answers."""

    def ask(
        machines: Sequence[str | None], heard: dict[int, bool], waited_for: int | None, *, has_store: bool = False
    ) -> Diagnosis | None:
        store = HashStore()
        detector = join(store, 0)
        for rank, machine in enumerate(machines[1:], start=1):
            if machine is not None:
                entry = json.dumps([rank, machine, 1])
                PrefixStore("gradwire/failure_detector", store).append("ping_servers", f"{entry}\n")
        detector.publish(0)
        monkeypatch.setattr(
            failure_detector,
            "ping_all",
            lambda rung, _: {rank: answers for rank, answers in heard.items() if rank in rung},
        )
        if not has_store:
            monkeypatch.setattr(detector, "_store", LostStore())
        return detector.find_lost("g", range(len(machines)), waited_for)

    return ask


@pytest.mark.parametrize(
    ("machines", "heard", "waited_for", "verdict"),
    [
        ((HERE, "b", "c"), {1: True}, 1, Diagnosis(lost=(2,))),
        ((HERE, "b", "c"), {}, 1, Diagnosis(lost=(1, 2), is_cut_off=True)),
        ((HERE, "b", "c"), {1: False}, 1, Diagnosis(lost=(1, 2))),  # b refuses, so the link works
        ((HERE, "b"), {}, 1, Diagnosis(lost=(1,), is_split=True)),
        ((HERE, "b"), {1: False}, 1, Diagnosis(lost=(1,))),
        ((HERE, HERE, "b", "b"), {1: True}, 1, Diagnosis(lost=(2, 3), is_split=True)),
        ((HERE, HERE, "b", "c"), {1: True}, 1, Diagnosis(lost=(2, 3), is_cut_off=True)),
        ((HERE, HERE), {1: False}, 1, Diagnosis(lost=(1,))),
        ((HERE, "b", "c"), {1: True, 2: True}, 2, Diagnosis(late=2)),
        ((HERE, "b", "c"), {1: True, 2: True}, None, Diagnosis()),
        ((HERE, "b", None), {}, 1, Diagnosis(lost=(1,), is_split=True)),
        ((HERE, "b", None), {1: True}, 1, Diagnosis(late=1)),
        ((HERE, "b", None), {1: True}, 2, None),
        ((HERE, "b", None), {1: True}, None, None),
        ((HERE, None, None), {}, 1, None),
    ],
)
def test_without_the_store_pings_tell_the_lost_the_late_and_the_unknown(
    machines: Sequence[str | None],
    heard: dict[int, bool],
    waited_for: int | None,
    verdict: Diagnosis | None,
    ask: Callable[..., Diagnosis | None],
) -> None:
    assert ask(machines, heard, waited_for) == verdict


@pytest.mark.parametrize(
    ("machines", "heard", "verdict"),
    [
        ((HERE, "b", "c"), {}, Diagnosis(lost=(1, 2), is_cut_off=True)),
        ((HERE, "b"), {}, Diagnosis(lost=(1,), is_split=True)),
        ((HERE, "b"), {1: False}, Diagnosis(lost=(1,))),
        ((HERE, "b", "c"), {1: True}, Diagnosis(lost=(2,))),
        ((HERE, None), {}, Diagnosis(lost=(1,))),
        ((HERE, HERE), {}, Diagnosis(lost=(1,))),
        (
            (HERE, HERE, "b"),
            {1: True},
            Diagnosis(lost=(2,), is_split=True),
        ),  # rank 1 tells nothing about this host's link
    ],
)
def test_with_the_store_pings_tell_whose_link_it_is_and_who_never_joined(
    machines: Sequence[str | None], heard: dict[int, bool], verdict: Diagnosis, ask: Callable[..., Diagnosis | None]
) -> None:
    assert ask(machines, heard, 1, has_store=True) == verdict


def test_what_a_rank_that_is_cut_off_believes_does_not_stand_for_others(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HashStore()
    first, second, _ = [join(store, rank) for rank in range(3)]
    monkeypatch.setattr(failure_detector, "ping_all", lambda *_: {})
    monkeypatch.setattr(first, "host", "another machine")
    assert first.find_lost("g", range(3), 1) == Diagnosis(lost=(1, 2), is_split=True)
    monkeypatch.undo()
    assert second.find_lost("g", range(3), 2) == Diagnosis(late=2)


def test_without_the_store_a_rank_can_still_be_heard_by_one_that_fails_later(
    join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 finds rank 0 lost and would leave at once; rank 2 asks while rank 1 lingers."""
    store = HashStore()
    lost, first = [join(store, rank) for rank in range(2)]
    first.publish(0)
    monkeypatch.setattr(first, "_store", LostStore())
    lost.ping_server.close()
    heard: list[dict[int, bool]] = []
    monkeypatch.setattr(
        failure_detector.time,
        "sleep",
        lambda seconds: heard.append(ping_all({1: first.ping_server.address}, 2)) if seconds == 0.2 else None,
    )
    assert first.find_lost("g", range(2), 0) == Diagnosis(lost=(0,))
    assert heard == [{1: True}]
