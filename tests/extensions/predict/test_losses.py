"""Lost hosts: the expected time against randomly drawn losses."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bench.extensions.predict.answers import stretch


def drawn(losses_per_s: float, checkpoint_s: float, restart_s: float, checkpoints: int = 200_000) -> float:
    """Return the mean time between checkpoints relative to the time without losses, simulated loss by loss."""
    generator = np.random.default_rng(7)
    until_lost = (float(gap) for gap in generator.exponential(1 / losses_per_s, 5 * checkpoints))
    time_s = 0.0
    for _ in range(checkpoints):
        needed_s = checkpoint_s
        while (gap_s := next(until_lost)) < needed_s:
            time_s += gap_s
            needed_s = restart_s + checkpoint_s
        time_s += needed_s
    return time_s / (checkpoints * checkpoint_s)


@pytest.mark.parametrize(
    ("losses_per_s", "checkpoint_s", "restart_s"), [(0.01, 10.0, 5.0), (0.05, 20.0, 3.0), (0.02, 5.0, 60.0)]
)
def test_the_expected_time_is_that_of_losses_drawn_one_by_one(
    losses_per_s: float, checkpoint_s: float, restart_s: float
) -> None:
    expected = stretch(losses_per_s=losses_per_s, checkpoint_s=checkpoint_s, restart_s=restart_s)
    assert drawn(losses_per_s, checkpoint_s, restart_s) == pytest.approx(expected, rel=0.02)


def test_rare_losses_cost_half_the_way_between_checkpoints_and_a_restart() -> None:
    assert stretch(losses_per_s=1e-6, checkpoint_s=100.0, restart_s=30.0) == pytest.approx(
        1 + 1e-6 * (100.0 / 2 + 30.0), rel=1e-7
    )


def test_more_of_anything_takes_longer() -> None:
    asked = {"losses_per_s": 0.01, "checkpoint_s": 20.0, "restart_s": 10.0}
    for name, factor in itertools.product(asked, (1.1, 10.0, 1e6)):
        assert stretch(**asked | {name: factor * asked[name]}) > stretch(**asked)
    assert stretch(**asked | {"checkpoint_s": 1e9}) == math.inf
