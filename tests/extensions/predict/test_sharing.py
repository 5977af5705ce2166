"""Amounts of work that shrink at rates that depend on which others are being worked on."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import simpy

from bench.extensions.predict.contention import FairShareQueue
from bench.extensions.predict.links import Floats


def equal_parts(busy: npt.NDArray[np.bool_]) -> Floats:
    return np.where(busy, 1 / max(1, busy.sum()), 0.0)


def ended(begun: list[float], amounts: list[list[float]]) -> list[list[float]]:
    """Return when each amount of each worker is finished; those at work share the whole equally."""
    env = simpy.Environment()
    sharing = FairShareQueue(env, len(begun), equal_parts)
    times: list[list[float]] = [[] for _ in begun]

    def work(index: int) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(begun[index])
        for amount in amounts[index]:
            yield sharing.begin(index, amount)
            times[index].append(env.now)

    for index in range(len(begun)):
        env.process(work(index))
    env.run()
    return times


def test_one_alone_has_all_of_it() -> None:
    assert ended([2.0], [[3.0, 1.0]]) == [[5.0, 6.0]]


def test_who_comes_later_takes_a_part_and_leaves_the_rest_sooner() -> None:
    """The first is alone until 1, and both share until 5, when its other 2 are done; 1 is left of the second's 3."""
    assert ended([0.0, 1.0], [[3.0], [3.0]]) == [[pytest.approx(5.0)], [pytest.approx(6.0)]]


def test_equal_ones_end_together_and_what_follows_at_once_shares_again() -> None:
    assert ended([0.0, 0.0], [[1.0, 1.0], [1.0, 1.0]]) == [[2.0, 4.0], [2.0, 4.0]]


def test_no_amount_takes_no_time() -> None:
    assert ended([1.0, 0.0], [[0.0], [2.0]]) == [[1.0], [pytest.approx(2.0)]]


def test_the_rate_that_one_would_have() -> None:
    env = simpy.Environment()
    sharing = FairShareQueue(env, 3, equal_parts)
    assert sharing.rate_with(1) == 1.0
    sharing.begin(0, 1.0)
    assert (sharing.rate_with(1), sharing.rate_with(0)) == (0.5, 1.0)
