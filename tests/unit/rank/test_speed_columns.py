"""Times of steps, for some of which the waiting time is known."""

from __future__ import annotations

import dataclasses

import pytest

from bench.rank.trainer import StepTime, speed_columns


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
    found = speed_columns([step(10.0, exposed_s) for exposed_s in known])
    assert found["exposed_s"] == pytest.approx(3.0)
    assert found["forward_backward_s"] == pytest.approx(7.0)


def test_where_no_wait_is_known_nothing_is_left_out() -> None:
    found = speed_columns([step(10.0, None)])
    assert (found["forward_backward_s"], found["exposed_s"]) == (10.0, None)


def test_what_an_optimizer_sends_afterwards_is_no_part_of_computing() -> None:
    late = dataclasses.replace(step(10.0, 5.0), waited_s=1.0)  # four seconds of the five came after the gradients
    found = speed_columns([late])
    assert (found["forward_backward_s"], found["exposed_s"]) == (9.0, 5.0)


def test_a_few_slow_steps_do_not_lift_the_wait_above_the_median_step() -> None:
    steps = [step(10.0, 5.0)] * 8 + [step(1000.0, 990.0)] * 2
    found = speed_columns(steps)
    waiting = (8 * 5 + 2 * 990) / (8 * 11 + 2 * 1001)
    assert found["step_time_s"] == 11.0
    assert found["exposed_s"] == pytest.approx(11.0 * waiting)
    assert found["forward_backward_s"] == pytest.approx(11.0 * ((8 * 10 + 2 * 1000) / (8 * 11 + 2 * 1001) - waiting))


def test_a_wait_is_set_against_the_steps_of_which_it_is_known() -> None:
    found = speed_columns([step(10.0, None)] * 2 + [step(100.0, 95.0)])
    assert found["exposed_s"] == pytest.approx(11.0 * 95 / 101)


def test_where_clocks_contradict_each_other_the_cell_is_empty() -> None:
    found = speed_columns([step(10.0, None), step(10.0, 88.2)])
    assert (found["exposed_s"], found["forward_backward_s"]) == (None, 10.0)


@pytest.mark.parametrize(("interval", "median_s"), [(1, 1.0), (4, 4.0), (30, 4.0)])
def test_a_step_is_the_mean_of_an_interval_in_which_few_exchange_something(interval: int, median_s: float) -> None:
    steps = [step(0.0, 0.0), step(0.0, 0.0), step(0.0, 0.0), step(12.0, 12.0)] * 3
    found = speed_columns(steps, interval)
    assert found["step_time_s"] == pytest.approx(median_s)
    assert found["exposed_s"] == pytest.approx(median_s * 12 / 16)
