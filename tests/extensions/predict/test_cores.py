"""Ranks on shared cores: the progress of each, computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from bench.core.config.syntax import Straggler
from bench.extensions.predict.calibration import CpuContention
from bench.extensions.predict.contention import Computing, Job, SharedCores, crowd_at, work_alone
from bench.extensions.predict.links import Links
from tests.extensions.predict.calibrations import calibration

WORK_S = 0.35
UNLIMITED = Links(host_of=np.arange(2), up_rate=np.full(2, np.inf), down_rate=np.full(2, np.inf), latency_s=np.zeros(2))


def cores(*shares: float, load: float = 1.0) -> SharedCores:
    """Return shared cores for ranks that do not slow each other down except by sharing."""
    return SharedCores(calibration=calibration(), shares=np.array(shares), load=load)


def test_who_begins_later_takes_half_of_the_core_from_then_on() -> None:
    """On one core: 1 s alone, 2 s together, and the second has 1 s more to do."""
    times = cores(1.0, 1.0).reached(np.array([10.0, 11.0]), np.array([1.5, 2.0]))
    np.testing.assert_allclose(times, [[12.0, 13.5], [13.0, 14.0]])


def test_who_begins_when_the_others_have_ended_has_the_core_alone() -> None:
    times = cores(1.0, 1.0).reached(np.array([0.0, 5.0]), np.array([2.0]))
    np.testing.assert_allclose(times, [[2.0, 7.0]])


def test_a_host_that_seldom_runs_leaves_the_core_to_others() -> None:
    """Shares 1 and 1/2 of one core: 2/3 and 1/3 of their speeds alone, then the second has its half."""
    times = cores(1.0, 0.5).reached(np.zeros(2), np.array([2.0]))
    np.testing.assert_allclose(times, [[3.0, 3.0 + (2.0 - 1.0) / 0.5]])
    alone = cores(0.5).reached(np.zeros(1), np.array([2.0]))
    np.testing.assert_allclose(alone, [[4.0]])


def test_cores_enough_for_all_let_each_go_its_way() -> None:
    times = cores(1.0, 1.0, 0.5, load=1 / 4).reached(np.array([0.0, 3.0, 1.0]), np.array([1.0, 1.0]))
    np.testing.assert_allclose(times, np.tile([1.0, 4.0, 3.0], (2, 1)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 9])
def test_all_that_begin_at_once_are_the_crowd_that_was_measured(ranks: int) -> None:
    known = calibration(
        cores=2,
        crowds=tuple(
            CpuContention(load=load, handed_over_s=(0.8 * seconds, 0.9 * seconds), computed_s=seconds, cpu_s=WORK_S)
            for load, seconds in ((0.5, WORK_S), (1.0, 0.4), (2.0, 0.95))
        ),
    )
    job = Job(encoded=(), links=UNLIMITED, slower=np.ones(ranks), load=ranks / 2, shared_cores=2)
    times = Computing.of_ranks(known, job).reached(np.zeros(ranks))
    crowd = crowd_at(known, ranks / 2)
    expected = [*crowd.handed_over_s, crowd.computed_s]
    np.testing.assert_allclose(times, np.tile(expected, (ranks, 1)).T)


def test_a_straggler_sleeps_for_what_it_computed_itself() -> None:
    """On one core: alone if the other rank begins later, in twice the time if both begin at once."""
    known = calibration()
    straggler = Straggler(rank=0, slowdown=3)
    job = Job(encoded=(), links=UNLIMITED, slower=np.ones(2), load=2.0, shared_cores=1, straggler=straggler)
    computing = Computing.of_ranks(known, job)
    work_s = work_alone(known)[-1]
    slept_s = 2 * work_s * (1 - known.batch_s / known.computed_s)
    alone, together = computing.reached(np.array([0.0, 100.0])), computing.reached(np.zeros(2))
    np.testing.assert_allclose(alone[-1], [work_s + slept_s, 100.0 + work_s])
    np.testing.assert_allclose(together[-1], [2 * (work_s + slept_s), 2 * work_s])
