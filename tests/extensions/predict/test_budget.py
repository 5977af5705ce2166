"""The division of a time budget among the parts of a measurement."""

from __future__ import annotations

import math

from bench.extensions.predict.calibration_worker import Budget, MeasuredPart

CROWDS = [MeasuredPart(text=f"round {number}", once_s=1.0, fixed_s=2.0, full=10, least=1) for number in range(4)]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def go_through(budget: Budget, clock: Clock, *, slower: float = 1.0) -> list[int]:
    """Return the repetitions of each part if everything takes `slower` times as long as expected."""
    made = []
    for part in CROWDS:
        repetitions, _ = budget.allot()
        seconds = slower * part.takes_s(repetitions)
        clock.now += seconds
        budget.made(repetitions, seconds)
        made.append(repetitions)
    return made


def test_nothing_is_cut_where_there_is_time_for_all() -> None:
    clock = Clock()
    budget = Budget(CROWDS, 84.0, clock)
    assert budget.left_s == 84.0
    assert budget.allot() == (10, math.inf)
    assert go_through(budget, clock) == [10] * 4


def test_equal_parts_get_equal_time_where_it_is_short() -> None:
    clock = Clock()
    budget = Budget(CROWDS, 48.0, clock)  # half of the time beyond the minimum of 12 s
    assert budget.allot() == (5, 12.0)
    made = go_through(budget, clock)
    assert made == [5, 5, 6, 6]  # the time left by rounding down
    assert clock.now <= 48.0


def test_short_measurements_are_repeated_in_full_where_long_ones_are_not() -> None:
    clock = Clock()
    short = MeasuredPart(text="short", fixed_s=0.1, full=10)
    budget = Budget([short, *CROWDS, short], 30.0, clock)
    assert budget.allot()[0] == 10
    budget.made(10, 1.0)
    assert go_through(budget, clock)[0] < 10
    assert budget.allot()[0] == 10


def test_what_is_least_is_made_however_late_it_is() -> None:
    assert go_through(Budget(CROWDS, 0.0, Clock()), Clock()) == [1] * 4


def test_what_took_longer_than_expected_leaves_less_to_the_rest_and_ends_in_time() -> None:
    clock = Clock()
    made = go_through(Budget(CROWDS, 84.0, clock), clock, slower=2.0)
    assert made[0] == 10
    assert made[0] > made[1] >= made[-1] >= 1
    assert clock.now <= 84.0 + 2 * 2.0  # one repetition more


def test_parts_that_were_measured_before_take_no_time() -> None:
    assert Budget(CROWDS[1:], 84.0, Clock()).left_s == 63.0
