"""What a rank waits for when training pauses: in training time, and before the pause begins."""

from __future__ import annotations

from unittest.mock import MagicMock, call

import pytest

from bench.strategies.async_server.training import AsyncTraining
from bench.train.trainer import Trainer

STEPS = 4


@pytest.mark.parametrize(
    ("evaluates_at", "saves_at", "waits"),
    [(STEPS, 9, ["synchronize"]), (9, STEPS, ["drain"]), (STEPS, STEPS, ["synchronize"]), (9, 9, [])],
)
def test_ranks_wait_for_each_other_while_the_clock_runs(evaluates_at: int, saves_at: int, waits: list[str]) -> None:
    trainer, seen = MagicMock(), MagicMock()
    trainer.configure_mock(step=STEPS, _evaluate_at=evaluates_at, _checkpoint_at=saves_at)
    seen.attach_mock(trainer.clock.running.return_value, "running")
    seen.attach_mock(trainer.strategy, "strategy")
    Trainer.train_until(trainer, STEPS)
    before, *between, after = seen.mock_calls
    assert (before, after) == (call.running.__enter__(), call.running.__exit__(None, None, None))
    assert between == [call.strategy.end_pause(), *(getattr(call.strategy, name)() for name in waits)]


def test_ranks_that_go_at_their_own_speed_wait_for_the_slowest_before_a_checkpoint() -> None:
    strategy = MagicMock()
    AsyncTraining.drain(strategy)
    assert strategy.mock_calls == [call.synchronize()]
