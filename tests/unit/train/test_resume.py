"""A rank that goes on: what it does before its first step."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from bench.core import spec
from bench.datasets.base import Part
from bench.strategies.base import BoundStrategy
from bench.train.record import Recorder
from bench.train.trainer import Trainer
from compressors.layer import Step
from tests.testing.configs import make_config

PART = Part(images=torch.zeros(64, 3, 32, 32, dtype=torch.uint8), labels=torch.zeros(64, dtype=torch.int64))


class RehearsedError(Exception):
    """What was rehearsed with."""


class Rehearsing:
    """A strategy that says which mini-batch it was given, and does no more."""

    shard_ids = (0,)

    def warm_up(self, _step: Step, x: torch.Tensor, y: torch.Tensor) -> None:
        raise RehearsedError(len(x), len(y))


def test_a_rank_rehearses_with_no_more_than_one_batch_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    trainer = Trainer(
        config=make_config(batch_size=4, accumulate=8),
        strategy=cast(BoundStrategy, Rehearsing()),
        dataset=cast(Any, spec.build("datasets", "digits")),
        train=PART,
        test=PART,
        recorder=cast(Recorder, None),
        device=torch.device("cpu"),
    )
    with pytest.raises(RehearsedError) as rehearsed:
        trainer.resume({})
    assert rehearsed.value.args == (4, 4)
