"""The waits of a rank when training pauses: within the training time, and before the pause begins."""

from __future__ import annotations

from unittest.mock import MagicMock, call

import pytest
import torch

from bench.rank.trainer import Trainer

STEPS = 4


def paused() -> tuple[MagicMock, MagicMock]:
    """Return a trainer after its steps, and the calls of its clock and strategy."""
    trainer, seen = MagicMock(), MagicMock()
    trainer.configure_mock(step=STEPS, _losses=[], device=torch.device("cpu"))
    seen.attach_mock(trainer.recorder.measuring.return_value, "running")
    seen.attach_mock(trainer.strategy, "strategy")
    return trainer, seen


@pytest.mark.parametrize(("evaluates_at", "waits"), [(STEPS, [call.strategy.synchronize()]), (9, [])])
def test_ranks_wait_for_each_other_while_the_clock_runs(evaluates_at: int, waits: list[object]) -> None:
    trainer, seen = paused()
    trainer._evaluate_at = evaluates_at
    Trainer.train_until(trainer, STEPS)
    before, *between, after = seen.mock_calls
    assert (before, after) == (call.running.__enter__(), call.running.__exit__(None, None, None))
    assert between == waits


def test_a_checkpoint_waits_for_ranks_that_are_behind_while_the_clock_runs() -> None:
    trainer, seen = paused()
    Trainer._checkpoint(trainer)
    before, state, after = seen.mock_calls
    assert (before, after) == (call.running.__enter__(), call.running.__exit__(None, None, None))
    assert state == call.strategy.state_dict()
