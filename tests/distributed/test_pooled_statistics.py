"""BatchNorm's running statistics in an evaluation are those of all ranks' samples together."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import nn

from bench.datasets.base import CLASSIFICATION, Dataset, Samples
from bench.models.base import pooled_buffers
from bench.rank.data import evaluate, pool_running_statistics_
from tests.testing.engines import assert_same_on_all_ranks

WORLD_SIZE = 3


def inputs(rank: int) -> torch.Tensor:
    """Return equally many samples of each rank, with different means, as of ranks with different classes."""
    return torch.randn(50, 4, generator=torch.Generator().manual_seed(rank)) + 5 * rank


class Net(nn.Sequential):
    def __init__(self) -> None:
        # Without momentum, the statistics are those of all samples so far.
        super().__init__(nn.BatchNorm1d(4, momentum=None), nn.BatchNorm1d(4, track_running_stats=False))
        self.register_buffer("other", torch.zeros(2))


def trained(rank: int) -> Net:
    net = Net()
    net(inputs(rank))
    net.other += rank  # type: ignore[operator]
    return net


def assert_pooled(buffers: dict[str, torch.Tensor]) -> None:
    everything = torch.cat([inputs(rank) for rank in range(WORLD_SIZE)])
    torch.testing.assert_close(buffers["0.running_mean"], everything.mean(dim=0))
    # Each rank's variance divides by 49, so the pooled one has that much more of the variance within ranks.
    within = torch.stack([inputs(rank).var(dim=0) for rank in range(WORLD_SIZE)]).mean(dim=0)
    expected = everything.var(dim=0, unbiased=False) + within / 50
    torch.testing.assert_close(buffers["0.running_var"], expected)
    torch.testing.assert_close(buffers["other"], torch.full((2,), 1.0))


@pytest.mark.ranks(WORLD_SIZE)
def test_ranks_pool_their_statistics(rank: int) -> None:
    net = trained(rank)
    pool_running_statistics_(net, None)
    first = {name: buffer.clone() for name, buffer in net.named_buffers()}
    assert_pooled(first)
    for buffer in first.values():
        assert_same_on_all_ranks(buffer)
    pool_running_statistics_(net, None)  # of equal statistics: nothing changes
    assert all(torch.allclose(first[name], buffer) for name, buffer in net.named_buffers())


@pytest.mark.ranks(WORLD_SIZE)
def test_an_evaluation_leaves_each_rank_its_own_statistics(rank: int) -> None:
    net = trained(rank)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    samples = Samples(inputs=inputs(rank), targets=torch.zeros(50, dtype=torch.int64))
    dataset = SimpleNamespace(
        dummy_batch=lambda n, device: torch.zeros(n, 4, device=device), normalise=lambda x: x, task=CLASSIFICATION
    )
    evaluate(net, [samples], cast(Dataset, dataset), torch.device("cpu"))
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def test_the_host_of_placed_replicas_pools_theirs() -> None:
    of_replicas = [dict(trained(rank).named_buffers()) for rank in range(WORLD_SIZE)]
    stacks = {name: torch.stack([each[name] for each in of_replicas]) for name in of_replicas[0]}
    means = lambda stacks: [stack.mean(dim=0) for stack in stacks]  # noqa: E731
    assert_pooled(pooled_buffers(stacks, ["0.running_var"], means))
