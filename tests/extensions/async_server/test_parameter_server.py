"""The parameter server in memory: waiting, updates applied together, and staleness."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bench.extensions.async_server.server import ClockEnd, ParameterServer, ServerReply, Session
from collectives.payloads import Dense
from collectives.payloads.base import unpack
from collectives.transport.base import TransportError
from tests.extensions.async_server.parameters import Recorded
from tests.testing.limits import LIMIT_S


def bounded(world_size: int, staleness: int, timeout_s: float = LIMIT_S) -> tuple[Recorded, list[Session]]:
    parameters = Recorded([3])
    server = ParameterServer(parameters, world_size, timeout_s, staleness=staleness)
    return parameters, [server.join(rank) for rank in range(world_size)]


def on_arrival(world_size: int) -> tuple[Recorded, list[Session]]:
    parameters = Recorded([3])
    server = ParameterServer(parameters, world_size, LIMIT_S, staleness=None)
    return parameters, [server.join(rank) for rank in range(world_size)]


def clock(session: Session, value: float = 1.0, *, dropped: bool = False) -> ServerReply:
    """Make one clock of a worker whose gradient is `value` everywhere."""
    session.push(0, Dense(torch.full((3,), value)))
    return session.end_clock(ClockEnd(index=session.clock, epoch=0, lr=0.1, dropped=dropped))


def together(*work: Callable[[], ServerReply]) -> list[ServerReply]:
    with ThreadPoolExecutor(len(work)) as pool:
        return [future.result() for future in [pool.submit(function) for function in work]]


def test_one_clock_is_applied_at_once_and_in_rank_order_whoever_came_first() -> None:
    parameters, sessions = bounded(3, staleness=5)
    for rank in (2, 0, 1):
        assert parameters.applied == []
        clock(sessions[rank], 10.0**rank)
    assert parameters.applied == [([(0, 0), (1, 0), (2, 0)], 3)]
    assert parameters.values[0].tolist() == [37.0] * 3


def test_a_worker_runs_ahead_up_to_the_bound_and_no_further() -> None:
    _, (fast, slow) = bounded(2, staleness=2)
    answers = [clock(fast) for _ in range(2)]
    assert [answer.version for answer in answers] == [0, 0]  # clock 2 starts at version 0: two behind
    waiting = ThreadPoolExecutor(1)
    third = waiting.submit(clock, fast)
    time.sleep(0.05)
    assert not third.done()
    clock(slow)
    assert third.result().version == 1
    assert third.result().staleness == 2
    waiting.shutdown()


def test_without_a_bound_to_lag_behind_nobody_starts_before_all_have_pushed() -> None:
    parameters, sessions = bounded(3, staleness=0)
    for index in range(4):
        answers = together(*(lambda s=session: clock(s) for session in sessions))
        assert {answer.version for answer in answers} == {index + 1}
        assert {answer.staleness for answer in answers} == {0}
    assert [num_terms for _, num_terms in parameters.applied] == [3] * 4


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_the_bound_holds_whatever_the_timing(staleness: int) -> None:
    parameters, sessions = bounded(4, staleness)
    seen: list[tuple[int, int]] = []  # (clock that starts, version of the parameters that it gets)

    def work(session: Session) -> ServerReply:
        dice = random.Random(session.rank)
        for _ in range(25):
            time.sleep(dice.random() * 0.002)
            answer = clock(session)
            assert answer.staleness is not None
            assert 0 <= answer.staleness <= staleness
            seen.append((session.clock, answer.version))
        return session.synchronize()

    answers = together(*(lambda s=session: work(s) for session in sessions))
    assert len(seen) == 100
    assert all(started - staleness <= version <= started for started, version in seen)
    assert {answer.version for answer in answers} == {25}
    assert parameters.applied == [([(rank, index) for rank in range(4)], 4) for index in range(25)]


def test_on_arrival_every_push_is_applied_alone_and_counts_as_its_share_of_a_step() -> None:
    parameters, sessions = on_arrival(2)
    steps = [clock(sessions[rank], float(index)).num_steps for index, rank in enumerate((0, 0, 1, 0))]
    assert [pushes for pushes, _ in parameters.applied] == [[(0, 0)], [(0, 1)], [(1, 0)], [(0, 2)]]
    assert {num_terms for _, num_terms in parameters.applied} == {1}
    assert steps == [0, 1, 1, 2]


def test_on_arrival_staleness_counts_the_versions_in_between() -> None:
    _, (fast, slow) = on_arrival(2)
    assert [clock(fast).staleness for _ in range(3)] == [0, 0, 0]
    assert clock(slow).staleness == 3
    assert clock(fast).staleness == 1
    assert clock(slow).staleness == 1


def test_a_dropped_push_changes_nothing_and_ends_the_clock() -> None:
    parameters, (first, second) = on_arrival(2)
    answer = clock(first, dropped=True)
    assert (answer.version, answer.staleness, answer.num_steps) == (0, None, 0)
    assert clock(second).num_steps == 1
    assert parameters.applied == [([(1, 0)], 1)]


def test_within_a_bound_the_others_go_on_without_a_dropped_push() -> None:
    parameters, sessions = bounded(3, staleness=1)
    for session in sessions:
        clock(session, dropped=session.rank == 1)
    assert parameters.applied == [([(0, 0), (2, 0)], 3)]  # the missing one counts as zero
    for session in sessions:
        assert clock(session, dropped=True).version >= 1
    assert len(parameters.applied) == 1
    assert sessions[2].version == 2


def test_all_synchronize_on_one_version() -> None:
    parameters, sessions = on_arrival(3)
    late = threading.Event()

    def work(session: Session) -> ServerReply:
        if session.rank == 2:
            late.wait()
        for _ in range(session.rank + 1):
            clock(session)
        return session.synchronize()

    threading.Timer(0.05, late.set).start()
    answers = together(*(lambda s=session: work(s) for session in sessions))
    assert [answer.version for answer in answers] == [6, 6, 6]
    assert [answer.num_steps for answer in answers] == [2, 2, 2]
    for answer in answers:
        assert torch.equal(unpack(answer.parameters[0]).to_dense(), parameters.values[0])
    assert together(*(lambda s=session: s.synchronize() for session in sessions))[0].version == 6


def test_who_wakes_up_late_synchronizes_on_the_same_version() -> None:
    _, (quick, late) = on_arrival(2)

    def synchronize_and_go_on(session: Session) -> list[int]:
        versions = []
        for _ in range(100):
            versions.append(session.synchronize().version)
            clock(session)
        return versions

    with ThreadPoolExecutor(2) as pool:
        quick_saw = pool.submit(synchronize_and_go_on, quick)
        late_saw = pool.submit(lambda: [late.synchronize().version for _ in range(100)])
    assert late_saw.result() == quick_saw.result() == list(range(100))


def test_who_keeps_the_others_waiting_is_named() -> None:
    _, sessions = bounded(3, staleness=0, timeout_s=0.05)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(clock, sessions[rank]) for rank in (0, 2)]
    for future in futures:
        with pytest.raises(TransportError, match=r"waited for rank 1, which did not push within 0\.05 s") as raised:
            future.result()
        assert raised.value.lost_rank == 1


def test_who_does_not_synchronize_is_named() -> None:
    _, sessions = bounded(2, staleness=0, timeout_s=0.05)
    with pytest.raises(TransportError, match="rank 0 waited for rank 1"):
        sessions[0].synchronize()


def test_a_failure_ends_every_wait() -> None:
    parameters = Recorded([3])
    server = ParameterServer(parameters, 2, LIMIT_S, staleness=0)
    first, second = server.join(0), server.join(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(clock, first)
        time.sleep(0.02)
        server.fail(TransportError("rank 1 is gone", lost_rank=1))
        with pytest.raises(TransportError, match="gone"):
            waiting.result()
    with pytest.raises(TransportError, match="gone"):
        clock(second)


def test_one_worker_alone_never_waits() -> None:
    for parameters, (session,) in (bounded(1, staleness=0), on_arrival(1)):
        assert [clock(session).num_steps for _ in range(3)] == [1, 2, 3]
        assert session.synchronize().version == 3
        assert len(parameters.applied) == 3
