"""What the ranks that remain say when one is killed, stopped or late: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from collectives.base import BoundCollective
from collectives.hierarchical import Hierarchical
from collectives.native import Native
from collectives.payloads import Dense
from collectives.pool import Pool
from collectives.ring import Ring
from collectives.transport import failure_detector
from collectives.transport.base import TransportError
from collectives.transport.failure_detector import FailureDetector, Verdict
from collectives.transport.ping import PingServer, ping_all
from collectives.transport.process_group import ProcessGroupTransport
from tests.testing.ranks import run_ranks

TIMEOUT_S = 2.0
LATE, KILLED = 1, 2


def dense() -> Dense:
    return Dense(torch.ones(1000))


def own_group(timeout_s: float = TIMEOUT_S) -> ProcessGroupTransport:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return ProcessGroupTransport(group, timeout_s=timeout_s)


def failure(collective: BoundCollective) -> tuple[str, int | None]:
    def sum_on_and_on() -> None:
        for _ in range(100):
            collective.sum(dense(), (0,))

    with pytest.raises(TransportError) as caught:
        sum_on_and_on()
    return str(caught.value), caught.value.lost_rank


def late_then_killed(rank: int) -> list[tuple[str, int | None]]:
    late: BoundCollective = Ring().bind(own_group())
    others = [collective.bind(own_group()) for collective in (Ring(), Native(), Hierarchical(), Pool(slot_bytes=4096))]
    for collective in (late, *others):
        collective.sum(dense(), (0,))
    said: list[tuple[str, int | None]] = []
    if rank == LATE:
        time.sleep(3 * TIMEOUT_S)
    else:
        said.append(failure(late))
    if rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    return said + [failure(collective) for collective in others]


def test_ranks_name_the_one_that_is_late_and_the_one_that_was_killed(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    by_rank = run_ranks(late_then_killed, 4, tmp_path, timeout_s=100.0, may_die=[KILLED])
    for rank in (0, 3):
        message, lost = by_rank[rank][0]
        assert lost == LATE
        assert f"rank {rank} waited 2 s for rank 1, which is alive but did not take part" in message
    for rank in (0, 1, 3):
        said = (f"rank {rank} lost rank 2, which does not answer any more", KILLED)
        assert by_rank[rank][-4:] == [said] * 4
    assert set(Path("/dev/shm").iterdir()) <= before


def stop_rank_1(rank: int) -> tuple[str, int | None]:
    ring = Ring().bind(own_group())
    ring.sum(dense(), (0,))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return failure(ring)


def test_ranks_name_the_one_that_was_stopped(tmp_path: Path) -> None:
    by_rank = run_ranks(stop_rank_1, 3, tmp_path, timeout_s=60.0, may_die=[1])
    assert [by_rank[rank][1] for rank in (0, 2)] == [1, 1]


def roll(store: Store, rank: int) -> FailureDetector:
    return FailureDetector(store, rank, 4, poll_s=0.02, grace_s=0.5)


def test_a_running_rank_answers_and_an_ended_one_does_not() -> None:
    store = HashStore()
    first, second = roll(store, 0), roll(store, 1)
    assert first.find_lost("g", [0, 1], 1) == Verdict(late=1)
    second.stop()
    time.sleep(0.1)
    assert first.find_lost("g", [0, 1], 1) == Verdict(lost=(1,))
    first.stop()


def test_a_rank_that_stopped_answers_no_ping_server_either() -> None:
    ping_server = PingServer("127.0.0.1")
    part = FailureDetector(HashStore(), 0, 1, ping_server=ping_server)
    assert ping_all({0: ping_server.address}, within_s=2) == {0: True}
    part.stop()
    assert ping_all({0: ping_server.address}, within_s=2) == {0: False}


def join_twice(_: int) -> list[str]:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    failure_detector.failure_detector()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    failure_detector.failure_detector()
    time.sleep(2 * failure_detector.POLL_S)  # within which the former thread sees that it is stopped
    return sorted(thread.name for thread in threading.enumerate() if thread.name in ("ping_server", "failure_detector"))


def test_a_process_that_joins_again_leaves_nothing_of_the_first_time(tmp_path: Path) -> None:
    assert run_ranks(join_twice, 1, tmp_path) == [["failure_detector", "ping_server"]]


def test_the_late_rank_is_the_one_that_waits_for_nobody() -> None:
    store = HashStore()
    parts = [roll(store, rank) for rank in range(4)]
    for rank in (1, 2):
        parts[rank].find_lost("g", [0, 1, 2, 3], rank + 1)
    assert parts[0].find_lost("g", [0, 1, 2, 3], 1) == Verdict(late=3)
    for part in parts:
        part.stop()


def test_the_first_verdict_stands() -> None:
    """Rank 0 finds rank 2 lost and leaves; rank 1 must not take rank 0 for the one that was lost."""
    store = HashStore()
    first, second = roll(store, 0), roll(store, 1)
    assert first.find_lost("g", [0, 1, 2], 2) == Verdict(lost=(2,))
    first.stop()
    time.sleep(0.1)
    assert second.find_lost("g", [0, 1, 2], 0) == Verdict(lost=(2,))
    second.stop()


BUSY_UNTIL_THE_END = """
import time
from torch.distributed import TCPStore
from collectives.transport.failure_detector import FailureDetector

detector = FailureDetector(TCPStore("127.0.0.1", 0, 1, True), 0, 1, poll_s=0.0)
time.sleep(0.05)
"""


def test_a_process_ends_well_while_its_detector_is_busy_with_the_store() -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUSY_UNTIL_THE_END], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


class FarStore:
    """A prefixed store, 20 ms away."""

    def __init__(self, prefix: str, store: Store) -> None:
        self._store = PrefixStore(prefix, store)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            time.sleep(0.02)
            return getattr(self._store, name)(*arguments)

        return call


def test_round_trips_do_not_grow_with_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 to 62 wait for the next one each; a round trip per rank would take longer than a call of the roll may."""
    store, num_ranks = HashStore(), 64
    monkeypatch.setattr(failure_detector, "PrefixStore", FarStore)
    parts = [FailureDetector(store, rank, num_ranks, poll_s=0.1, grace_s=1.0) for rank in range(num_ranks)]
    for rank in range(num_ranks - 1):
        PrefixStore("gradwire/failure_detector", store).set(f"g/waits/{rank}", str(rank + 1))
    assert parts[0].find_lost("g", range(num_ranks), 1) == Verdict(late=num_ranks - 1)
    for part in parts:
        part.stop()


def test_ranks_that_have_not_joined_yet_do_not_keep_one_from_answering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "PrefixStore", FarStore)
    store = HashStore()
    first, second = [FailureDetector(store, rank, 64, poll_s=0.1, grace_s=1.0) for rank in range(2)]
    assert first.find_lost("g", [0, 1], 1) == Verdict(late=1)
    assert first.find_lost("g", [0, 1, 2], 1) == Verdict(lost=(2,))
    first.stop()
    second.stop()


class UnreachableStore(Store):
    """What a rank sees whose link is down: a call takes forever."""

    def __init__(self) -> None:
        super().__init__()
        self.is_over = threading.Event()

    def set(self, key: str, value: str) -> None:
        self.is_over.wait(60)

    def add(self, key: str, value: int) -> int:
        self.is_over.wait(60)
        return 0


def test_a_rank_that_can_ask_nobody_calls_nobody_lost() -> None:
    started, store = time.monotonic(), UnreachableStore()
    assert roll(store, 0).find_lost("g", [0, 1, 2], 1) is None
    assert time.monotonic() - started < 5
    store.is_over.set()


HERE = "127.0.0.1"


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Verdict | None]]:
    """What rank 0 finds out, given every rank's machine (None: no ping server) and what it hears from them."""
    parts: list[FailureDetector] = []

    def ask(
        machines: Sequence[str | None], heard: dict[int, bool], waited_for: int | None, *, has_store: bool = False
    ) -> Verdict | None:
        store = HashStore()
        for rank, machine in enumerate(machines):
            address = json.dumps(None if machine is None else (machine, 1))
            PrefixStore("gradwire/failure_detector", store).set(f"ping_server/{rank}", address)
        monkeypatch.setattr(
            failure_detector,
            "ping_all",
            lambda rung, _: {rank: answers for rank, answers in heard.items() if rank in rung},
        )
        if not has_store:
            monkeypatch.setattr(failure_detector, "_within", lambda *_: None)
        parts.append(FailureDetector(store, 0, len(machines), ping_server=PingServer(HERE), poll_s=0.02, grace_s=0.5))
        time.sleep(0.1)  # it learns the ping_servers
        return parts[-1].find_lost("g", range(len(machines)), waited_for)

    yield ask
    for part in parts:
        part.stop()


@pytest.mark.parametrize(
    ("machines", "heard", "waited_for", "verdict"),
    [
        ((HERE, "b", "c"), {1: True}, 1, Verdict(lost=(2,))),
        ((HERE, "b", "c"), {}, 1, Verdict(lost=(1, 2), is_cut_off=True)),
        ((HERE, "b", "c"), {1: False}, 1, Verdict(lost=(1, 2))),  # b refuses, so the link works
        ((HERE, "b"), {}, 1, Verdict(lost=(1,), is_split=True)),
        ((HERE, "b"), {1: False}, 1, Verdict(lost=(1,))),
        ((HERE, HERE, "b", "b"), {1: True}, 1, Verdict(lost=(2, 3), is_split=True)),
        ((HERE, HERE, "b", "c"), {1: True}, 1, Verdict(lost=(2, 3), is_cut_off=True)),
        ((HERE, HERE), {1: False}, 1, Verdict(lost=(1,))),
        ((HERE, "b", "c"), {1: True, 2: True}, 2, Verdict(late=2)),
        ((HERE, "b", "c"), {1: True, 2: True}, None, Verdict()),
        ((HERE, "b", None), {}, 1, Verdict(lost=(1,), is_split=True)),
        ((HERE, "b", None), {1: True}, 1, Verdict(late=1)),
        ((HERE, "b", None), {1: True}, 2, None),
        ((HERE, "b", None), {1: True}, None, None),
        ((HERE, None, None), {}, 1, None),
    ],
)
def test_without_the_store_ping_servers_tell_the_lost_the_late_and_the_unknown(
    machines: Sequence[str | None],
    heard: dict[int, bool],
    waited_for: int | None,
    verdict: Verdict | None,
    ask: Callable[..., Verdict | None],
) -> None:
    assert ask(machines, heard, waited_for) == verdict


@pytest.mark.parametrize(
    ("machines", "heard", "verdict"),
    [
        ((HERE, "b", "c"), {}, Verdict(lost=(1, 2), is_cut_off=True)),
        ((HERE, "b"), {}, Verdict(lost=(1,), is_split=True)),
        ((HERE, "b"), {1: False}, Verdict(lost=(1,))),
        ((HERE, None), {}, Verdict(lost=(1,))),
        ((HERE, HERE), {}, Verdict(lost=(1,))),
    ],
)
def test_where_nobody_elsewhere_answers_in_the_store_ping_servers_tell_whose_link_it_is(
    machines: Sequence[str | None], heard: dict[int, bool], verdict: Verdict, ask: Callable[..., Verdict | None]
) -> None:
    assert ask(machines, heard, 1, has_store=True) == verdict


def test_an_answer_from_this_machine_does_not_say_that_its_link_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "ping_all", lambda *_: {1: True})
    store = HashStore()
    PrefixStore("gradwire/failure_detector", store).set("ping_server/2", json.dumps(("b", 1)))
    parts = [
        FailureDetector(store, rank, 3, ping_server=PingServer(HERE), poll_s=0.02, grace_s=0.5) for rank in range(2)
    ]
    time.sleep(0.1)  # they learn the ping_servers
    assert parts[0].find_lost("g", range(3), 1) == Verdict(lost=(2,), is_split=True)
    for part in parts:
        part.stop()


def test_without_the_store_a_rank_can_still_be_heard_by_one_that_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_detector, "_within", lambda *_: None)
    store = HashStore()
    lost, first, second = [
        FailureDetector(store, rank, 3, ping_server=PingServer(HERE), poll_s=0.02, grace_s=1.0) for rank in range(3)
    ]
    time.sleep(0.1)  # they learn each other's ping_servers
    lost.stop()

    def fail_and_leave() -> None:
        assert first.find_lost("g", range(3), 0) == Verdict(lost=(0,))
        first.stop()

    leaving = threading.Thread(target=fail_and_leave)
    leaving.start()
    time.sleep(0.2)
    assert second.find_lost("g", range(3), 1) == Verdict(lost=(0,))
    leaving.join()
    second.stop()


VERDICTS = {
    Verdict(lost=(1,)): ("rank 0 lost rank 1, which does not answer any more", 1),
    Verdict(lost=(1, 2)): ("rank 0 lost rank 1 and rank 2, which do not answer any more", 1),
    Verdict(lost=(1,), is_split=True): (
        "rank 0 and rank 1 cannot reach each other; the link of either may be down",
        None,
    ),
    Verdict(lost=(1, 2), is_cut_off=True): (
        "rank 0 lost all other ranks: none of them answers any more; its own link may be down",
        None,
    ),
    Verdict(lost=(2,), is_cut_off=True): (
        "rank 0 lost all ranks on other machines: none of them answers any more; its own link may be down",
        None,
    ),
    Verdict(late=1): (
        "rank 0 waited 2 s for rank 1, which is alive but did not take part; a slow rank needs a longer timeout",
        1,
    ),
    None: (
        "rank 0 waited in vain for rank 1 and cannot find out who is lost: the rendezvous store does not answer",
        None,
    ),
}


def say_all(_: int) -> list[tuple[str, int | None]]:
    transport = own_group()
    said = []
    for verdict in VERDICTS:
        transport._failure_detector.find_lost = lambda *_, verdict=verdict: verdict  # type: ignore[method-assign, misc]
        error = transport.timeout_error(1)
        said.append((str(error), error.lost_rank))
    dist.barrier()  # a rank that ends while another still connects would fail that one
    return said


def test_every_verdict_has_its_sentence(tmp_path: Path) -> None:
    assert run_ranks(say_all, 3, tmp_path)[0] == list(VERDICTS.values())
