"""The steps that are timed: those after the first steps of all ranks together."""

from __future__ import annotations

import contextlib
from typing import Any, cast
from unittest import mock

import pytest
import torch

from bench.core import spec
from bench.datasets.base import ImageSet
from bench.strategies.base import Batch, BoundStrategy
from bench.train.record import Recorder
from bench.train.trainer import Trainer
from compressors.ddp.report import StepReport
from tests.testing.configs import make_config

PART = ImageSet(images=torch.zeros(64, 3, 32, 32, dtype=torch.uint8), labels=torch.zeros(64, dtype=torch.int64))


class Among:
    """A strategy that computes nothing; in a step of this rank, all ranks together make `steps_of_all` steps."""

    def __init__(self, steps_of_all: int) -> None:
        self._each, self._done = steps_of_all, 0

    def train_step(self, batch: Batch) -> StepReport:
        batch.on_loss(torch.zeros(()))
        self._done += self._each
        return StepReport(num_steps=self._done)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.mark.parametrize(
    ("steps_of_all", "profile", "timed"),
    [
        pytest.param(1, 0, 9, id="ranks-in-step"),
        pytest.param(4, 0, 3, id="a-slow-rank"),  # its second step is the eighth of all
        pytest.param(8, 1, 0, id="a-slow-rank-that-is-looked-at"),  # the profiler runs until its ninth step
    ],
)
def test_a_slow_rank_is_timed_from_the_step_of_all_on(
    steps_of_all: int, profile: int, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    recorder, profiler = mock.Mock(measuring=contextlib.nullcontext), mock.Mock(step_num=0)
    profiler.step.side_effect = lambda: setattr(profiler, "step_num", profiler.step_num + 1)
    trainer = Trainer(
        config=make_config(batch_size=4, steps=100, epochs=None, warmup_steps=7, profile=profile),
        strategy=cast(BoundStrategy, Among(steps_of_all)),
        dataset=cast(Any, spec.build("datasets", "digits")),
        train=PART,
        test=PART,
        recorder=cast(Recorder, recorder),
        device=torch.device("cpu"),
        save=mock.Mock(),
        profiler=profiler if profile else None,
    )
    trainer.train_until(16)
    assert trainer.own_steps == 16 // steps_of_all
    assert len(trainer.times) == timed
