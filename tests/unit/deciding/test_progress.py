"""The line after every seed."""

import pytest

from bench.deciding.progress import time_left


@pytest.mark.parametrize(
    ("fewest", "most", "budget_s", "text"),
    [
        (3, 19, 600.0, "about 50 s to 3 min 30 s left"),
        (3, 19, 60.0, "about 50 s to 80 s left"),  # the check comes after the budget
        (0, 0, 600.0, "about 20 s left"),
        (1, 1, -5.0, "about 20 s left"),
    ],
)
def test_the_time_left_is_a_range_until_all_methods_are_decided(
    fewest: int, most: int, budget_s: float, text: str
) -> None:
    assert time_left(fewest, most, seed_s=10.0, budget_s=budget_s, rest_s=20.0) == text
