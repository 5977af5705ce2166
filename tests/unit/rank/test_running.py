"""Numbers of which only minimum, mean and maximum are kept."""

from __future__ import annotations

import dataclasses

import pytest

from bench.rank.record import RunningStats, mean_loss


def test_of_none_nothing_is_known_and_of_some_what_a_list_would_say() -> None:
    running, values = RunningStats(), [0.3, 0.1, 0.7]
    assert (running.least, running.mean, running.largest) == (None, None, None)
    for value in values:
        running.add(value)
    assert (running.least, running.mean, running.largest) == (0.1, sum(values) / 3, 0.7)
    assert RunningStats(**dataclasses.asdict(running)) == running


def test_a_rank_that_made_more_steps_weighs_more_in_the_mean_loss() -> None:
    def figures(loss: float | None, steps: int) -> dict[str, float | None]:
        return {"train_loss": loss, "steps": steps}

    assert mean_loss([figures(3.0, 30), figures(1.0, 10)]) == pytest.approx(2.5)
    assert mean_loss([figures(0.1, 7), figures(0.2, 7), figures(0.4, 7)]) == (0.1 + 0.2 + 0.4) / 3
    assert mean_loss([figures(None, 0), figures(1.0, 10)]) == 1
    assert mean_loss([figures(None, 0)]) is None
