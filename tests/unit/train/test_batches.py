"""Mini-batches: a rank that goes on gets the ones that were to come, and accumulated ones are the same samples."""

from __future__ import annotations

import itertools

import pytest
import torch

from bench.core import spec
from bench.datasets.base import Part
from bench.train.batches import Batches
from tests.testing.configs import make_config

DATASET = spec.build("datasets", "digits")
TRAIN = Part(
    images=torch.arange(40, dtype=torch.uint8).view(40, 1, 1, 1).expand(40, 3, 32, 32), labels=torch.arange(40)
)


def batches(**changes: object) -> Batches:
    config = make_config(**{"batch_size": 4, "augment": True, **changes})
    return Batches(config, DATASET, TRAIN, 1, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize("used", [0, 1, 4, 5, 6, 10])
def test_a_rank_that_goes_on_gets_the_batches_that_were_to_come(used: int) -> None:
    """Five batches are an epoch."""
    whole = batches()
    for _ in range(used):
        next(whole)
    resumed = batches()
    next(resumed)  # as in a rehearsal
    resumed.load_state_dict(whole.state_dict())
    for _ in range(7):
        (x, y), (again, labels) = next(whole), next(resumed)
        assert torch.equal(x, again)
        assert torch.equal(y, labels)


def test_accumulated_batches_are_those_of_one_larger_batch() -> None:
    small, large = batches(accumulate=2), batches(batch_size=8)
    for _ in itertools.repeat(None, 4):
        (x, y), (again, labels) = next(small), next(large)
        assert torch.equal(x, again)
        assert torch.equal(y, labels)
