"""A resumed rank: its actions before its first step."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from bench.strategies.ddp import SharedGradients
from tests.testing.configs import make_config


def test_a_rank_rebuilds_buckets_with_no_more_than_one_batch_fits_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    strategy = mock.MagicMock()
    strategy._setup.config, strategy._setup.device = make_config(batch_size=4, accumulate=8), torch.device("cpu")
    SharedGradients._rebuild_buckets(strategy)
    (batch,) = strategy._compute_gradients.call_args.args
    assert (batch.x.shape, batch.y.shape, batch.num_parts) == ((4, 3, 32, 32), (4,), 1)
