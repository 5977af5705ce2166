"""The steps that are timed: those after the first steps of all ranks together."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any, cast
from unittest import mock

import pytest
import torch

from bench.core import spec
from bench.core.errors import DIVERGED
from bench.datasets.base import DatasetError, Samples
from bench.rank.data import RankData
from bench.rank.record import Recorder
from bench.rank.trainer import Diverged, Trainer
from bench.strategies.base import Batch, BoundStrategy
from gradwire.exchange.report import StepReport
from tests.testing.configs import make_config

PART = Samples(inputs=torch.zeros(64, 3, 32, 32, dtype=torch.uint8), targets=torch.zeros(64, dtype=torch.int64))


class Among:
    """A strategy that computes nothing; in a step of this rank, all ranks together make `steps_of_all` steps."""

    interval = 1
    first_step = 0
    evaluates = True

    def __init__(self, steps_of_all: int) -> None:
        self._each, self._done = steps_of_all, 0

    def train_step(self, batch: Batch) -> StepReport:
        batch.on_loss(torch.zeros(()))
        self._done += self._each
        return StepReport(num_steps=self._done)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def make_trainer(
    strategy: Among, recorder: mock.Mock, profiler: mock.Mock | None = None, part: Samples = PART, **config: Any
) -> Trainer:
    dataset = cast(Any, spec.build("datasets", "digits"))
    complete = make_config(batch_size=4, **config)
    return Trainer(
        config=complete,
        strategy=cast(BoundStrategy, strategy),
        dataset=dataset,
        data=RankData.of(complete, dataset, part, part),
        recorder=cast(Recorder, recorder),
        device=torch.device("cpu"),
        save=mock.Mock(),
        profiler=profiler,
    )


@pytest.mark.parametrize(
    ("steps_of_all", "profile", "timed"),
    [
        pytest.param(1, 0, 9, id="ranks-in-step"),
        pytest.param(4, 0, 3, id="a-slow-rank"),  # its second step is the eighth of all
        pytest.param(8, 1, 0, id="a-slow-rank-that-is-looked-at"),  # the profiler runs until its ninth step
    ],
)
def test_a_slow_rank_is_timed_from_the_step_of_all_on(steps_of_all: int, profile: int, timed: int) -> None:
    recorder, profiler = mock.Mock(measuring=contextlib.nullcontext), mock.Mock(step_num=0)
    profiler.step.side_effect = lambda: setattr(profiler, "step_num", profiler.step_num + 1)
    trainer = make_trainer(
        Among(steps_of_all),
        recorder,
        profiler if profile else None,
        steps=100,
        epochs=None,
        warmup_steps=7,
        profile=profile,
    )
    trainer.train_until(16)
    assert trainer.own_steps == 16 // steps_of_all
    assert len(trainer.times) == timed


@pytest.mark.parametrize(
    ("every", "epochs", "steps"),
    [
        (0.25, 1, [2, 4, 6, 8]),
        (0.3, 2, [3, 5, 8, 10, 12, 15, 16]),  # the first step at or after each multiple of 2.4 steps, and the last
        (0.01, 1, [1, 2, 3, 4, 5, 6, 7, 8]),  # at most once per step
        (1, 2, [8, 16]),
        (0, 2, [16]),
    ],
)
def test_evaluations_come_at_parts_of_an_epoch(
    every: float, epochs: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.rank.trainer.evaluate", lambda _, parts, *__: [mock.Mock(accuracy=0.5) for _ in parts])
    recorder = mock.Mock(measuring=contextlib.nullcontext)
    make_trainer(Among(1), recorder, world_size=2, epochs=epochs, steps=None, eval_every=every).run()
    written = [call.kwargs["columns"] for call in recorder.record_evaluation.call_args_list]
    assert [columns["step"] for columns in written] == steps
    assert [columns["status"] for columns in written] == ["running"] * (len(steps) - 1) + ["ok"]
    # the training samples are evaluated only at whole epochs, of 8 steps
    assert [columns["train_accuracy"] for columns in written] == [None if step % 8 else 0.5 for step in steps]


def test_a_run_ends_at_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracies = iter([0.5, 0.5, 0.8, 0.8, 0.9, 0.9])
    monkeypatch.setattr("bench.rank.trainer.evaluate", lambda *_: [mock.Mock(accuracy=next(accuracies)) for _ in "ab"])
    recorder = mock.Mock(measuring=contextlib.nullcontext)
    target = {"target_accuracy": 0.8, "stop_at_target": True}
    make_trainer(Among(1), recorder, world_size=2, epochs=3, steps=None, eval_every=1, **target).run()
    written = [call.kwargs["columns"] for call in recorder.record_evaluation.call_args_list]
    assert [(columns["step"], columns["status"]) for columns in written] == [(8, "running"), (16, "ok")]


def test_the_last_row_has_the_accuracy_of_the_training_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.rank.trainer.evaluate", lambda _, parts, *__: [mock.Mock(accuracy=0.9) for _ in parts])
    recorder = mock.Mock(measuring=contextlib.nullcontext)
    target = {"target_accuracy": 0.8, "stop_at_target": True}
    make_trainer(Among(1), recorder, world_size=2, epochs=3, steps=None, eval_every=0.25, **target).run()
    (only,) = [call.kwargs["columns"] for call in recorder.record_evaluation.call_args_list]
    assert (only["step"], only["status"], only["train_accuracy"]) == (2, "ok", 0.9)


def test_a_rank_that_returns_goes_on_at_the_step_of_the_run_and_leaves_evaluations_to_others() -> None:
    strategy, recorder = Among(1), mock.Mock(measuring=contextlib.nullcontext)
    strategy.first_step = strategy._done = 21
    strategy.evaluates = False
    trainer = make_trainer(strategy, recorder, world_size=2, epochs=4, steps=None, eval_every=1, warmup_steps=3)
    (batches,) = trainer._batches
    assert (batches.epoch, len(batches.unused())) == (2, 32 - 5 * 4)  # 8 steps per epoch, of 4 samples
    trainer.run()
    assert recorder.record_evaluation.call_args_list == []
    handed_over = [call.args[0]["samples"] for call in recorder.hand_over.call_args_list]
    assert handed_over == [3 * 4, 11 * 4]  # at steps 24 and 32
    assert trainer.own_steps == 11


@dataclasses.dataclass
class Lost(Among):
    """A strategy whose loss is NaN in one step, and whose gradients are not finite in all steps if `skips`."""

    at: int = -1
    skips: bool = False

    def __post_init__(self) -> None:
        super().__init__(1)

    def train_step(self, batch: Batch) -> StepReport:
        batch.on_loss(torch.tensor(math.nan if batch.step.index == self.at else 1.0))
        return StepReport(skipped=self.skips)


@pytest.mark.parametrize(
    ("strategy", "value", "message"),
    [
        (Lost(at=0), math.nan, "the loss is nan at step 0, because the data hold NaN or infinite values, or values"),
        (Lost(at=3), math.inf, "the loss is nan at step 3, because the data hold NaN or infinite values, or values"),
        (Lost(at=0), 1.0, "the loss is nan at step 0, before any update; check the model, its initial weights and the"),
        (Lost(at=3), 1.0, "the loss is nan at step 3; training has diverged: try a lower --lr"),
        (Lost(skips=True), 1.0, "10 steps in a row had a non-finite gradient, before any update; check the model, its"),
    ],
)
def test_a_loss_that_is_not_finite_is_blamed_on_its_cause(strategy: Lost, value: float, message: str) -> None:
    part = Samples(inputs=torch.full((64, 3, 32, 32), value), targets=PART.targets)
    trainer = make_trainer(strategy, mock.Mock(measuring=contextlib.nullcontext), part=part, steps=20, epochs=None)
    with pytest.raises((Diverged, DatasetError), match=f"^{message}") as error:
        trainer.train_until(20)
    assert (type(error.value).__name__ == DIVERGED) == ("lower --lr" in message)
