"""Times of steps, of some of which it is known what they waited for."""

from __future__ import annotations

import dataclasses

import pytest

from bench.train.clock import StepTime, StepTimes


def step(until_exchanged_s: float, exposed_s: float | None) -> StepTime:
    return StepTime(
        total_s=until_exchanged_s + 1,
        cpu_s=0.5,
        until_exchanged_s=until_exchanged_s,
        waited_s=exposed_s,
        encode_s=None,
        exchange_s=None,
        exposed_s=exposed_s,
    )


@pytest.mark.parametrize("known", [(2.0, 4.0, 3.0), (None, None, 3.0)])
def test_compute_is_what_is_left_without_the_wait_that_is_known(known: tuple[float | None, ...]) -> None:
    found = StepTimes(steps=[step(10.0, exposed_s) for exposed_s in known]).columns()
    assert found["exposed_s"] == pytest.approx(3.0)
    assert found["forward_backward_s"] == pytest.approx(7.0)


def test_where_no_wait_is_known_nothing_is_left_out() -> None:
    found = StepTimes(steps=[step(10.0, None)]).columns()
    assert (found["forward_backward_s"], found["exposed_s"]) == (10.0, None)


def test_what_an_optimizer_sends_afterwards_is_no_part_of_computing() -> None:
    late = dataclasses.replace(step(10.0, 5.0), waited_s=1.0)  # four seconds of the five came after the gradients
    found = StepTimes(steps=[late]).columns()
    assert (found["forward_backward_s"], found["exposed_s"]) == (9.0, 5.0)
