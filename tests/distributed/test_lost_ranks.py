"""Messages of the remaining ranks when one is killed, stopped or late: real processes, real signals."""

from __future__ import annotations

import datetime
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from collectives.allreduce import Native, Ring
from collectives.base import BoundCollective
from collectives.hierarchical import Hierarchical
from collectives.payloads import Dense
from collectives.pool import Pool
from collectives.transport import failure_detector
from collectives.transport.base import Transport, TransportError
from collectives.transport.failure_detector import Diagnosis
from collectives.transport.process_group import ProcessGroupTransport, backend_failure
from collectives.transport.sockets import open_transport
from tests.testing.ranks import run_ranks

TIMEOUT_S = 2.0
LATE, KILLED = 1, 2


def dense() -> Dense:
    return Dense(torch.ones(1000))


def own_group() -> dist.ProcessGroup:
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    return group


def over_gloo() -> ProcessGroupTransport:
    return ProcessGroupTransport(own_group(), timeout_s=TIMEOUT_S)


def over_sockets() -> Transport:
    return open_transport(own_group(), timeout_s=TIMEOUT_S)


def failure(collective: BoundCollective) -> tuple[str, int | None]:
    def sum_on_and_on() -> None:
        for _ in range(100):
            collective.sum(dense(), (0,))

    with pytest.raises(TransportError) as caught:
        sum_on_and_on()
    return str(caught.value), caught.value.lost_rank


def late_then_killed(rank: int, folder: Path, in_memory: Path) -> list[tuple[str, int | None]]:
    late: BoundCollective = Ring().bind(over_sockets())
    others: list[BoundCollective] = [Ring().bind(over_gloo())]
    others += [collective.bind(over_sockets()) for collective in (Ring(), Native(), Hierarchical())]
    others.append(Pool(path=(str(in_memory),), slot_bytes=4096).bind(over_sockets()))
    for collective in (late, *others):
        collective.sum(dense(), (0,))
    said: list[tuple[str, int | None]] = []
    if rank == LATE:
        while len(list(folder.iterdir())) < 3:  # until the others have given up
            time.sleep(0.05)
    else:
        said.append(failure(late))
        (folder / str(rank)).touch()
    if rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    return said + [failure(collective) for collective in others]


def test_ranks_name_the_one_that_is_late_and_the_one_that_was_killed(tmp_path: Path, in_memory: Path) -> None:
    (tmp_path / "gave-up").mkdir()
    by_rank = run_ranks(late_then_killed, 4, tmp_path, args=(tmp_path / "gave-up", in_memory), may_die=[KILLED])
    for rank in (0, 3):
        message, lost = by_rank[rank][0]
        assert lost == LATE
        assert f"rank {rank} waited 2 s for rank 1, which is alive but did not take part" in message
    for rank in (0, 1, 3):
        said = (f"rank {rank} lost rank 2, which does not answer any more", KILLED)
        assert by_rank[rank][-5:] == [said] * 5


def stop_rank_1(rank: int) -> tuple[str, int | None]:
    ring = Ring().bind(over_sockets())
    ring.sum(dense(), (0,))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    return failure(ring)


def test_ranks_name_the_one_that_was_stopped(tmp_path: Path) -> None:
    by_rank = run_ranks(stop_rank_1, 3, tmp_path, may_die=[1])
    assert [by_rank[rank][1] for rank in (0, 2)] == [1, 1]


def meet_one_that_was_killed(rank: int) -> tuple[str, int | None] | None:
    """Return the error of creating a group that a killed rank never joins."""
    failure_detector.failure_detector()
    if rank == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        dist.new_group(timeout=datetime.timedelta(seconds=TIMEOUT_S))
    error = backend_failure(caught.value)
    return error and (str(error), error.lost_rank)


def test_ranks_that_make_a_group_name_the_one_that_does_not_join(tmp_path: Path) -> None:
    by_rank = run_ranks(meet_one_that_was_killed, 3, tmp_path, may_die=[KILLED])
    assert [by_rank[rank] for rank in (0, 1)] == [
        (f"rank {rank} lost rank 2, which does not answer any more", KILLED) for rank in (0, 1)
    ]


def join_twice(_: int) -> int:
    failure_detector.failure_detector()
    num_threads = threading.active_count()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    failure_detector.failure_detector()
    while threading.active_count() > num_threads:
        time.sleep(0.01)  # the old thread notices that its server is closed
    return [thread.name for thread in threading.enumerate()].count("ping_server")


def test_a_process_that_joins_again_leaves_nothing_of_the_first_time(tmp_path: Path) -> None:
    assert run_ranks(join_twice, 1, tmp_path) == [1]


VERDICTS = {
    Diagnosis(lost=(1,)): ("rank 0 lost rank 1, which does not answer any more", 1),
    Diagnosis(lost=(1, 2)): ("rank 0 lost rank 1 and rank 2, which do not answer any more", 1),
    Diagnosis(lost=(1,), is_split=True): (
        "rank 0 and rank 1 cannot reach each other; the link of either may be down",
        None,
    ),
    Diagnosis(lost=(1, 2), is_cut_off=True): (
        "rank 0 lost all other ranks: none of them answers any more; its own link may be down",
        None,
    ),
    Diagnosis(lost=(2,), is_cut_off=True): (
        "rank 0 lost all ranks on other machines: none of them answers any more; its own link may be down",
        None,
    ),
    Diagnosis(late=1): (
        "rank 0 waited 2 s for rank 1, which is alive but did not take part; a slow rank needs a longer timeout",
        1,
    ),
    None: (
        "rank 0 waited in vain for rank 1 and cannot find out who is lost: the rendezvous store does not answer",
        None,
    ),
}


def say_all(_: int) -> list[tuple[str, int | None]]:
    transport = over_gloo()
    said = []
    for verdict in VERDICTS:
        transport._failure_detector.find_lost = lambda *_, verdict=verdict: verdict  # type: ignore[method-assign, misc]
        error = transport.timeout_error(1)
        said.append((str(error), error.lost_rank))
    dist.barrier()  # a rank that ends while another still connects would make that one fail
    return said


def test_every_verdict_has_its_sentence(tmp_path: Path) -> None:
    assert run_ranks(say_all, 3, tmp_path)[0] == list(VERDICTS.values())
