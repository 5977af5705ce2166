"""BatchNorm's running statistics in an evaluation are those of all ranks' samples together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import nn

from bench.datasets.base import CLASSIFICATION, Dataset, Samples
from bench.models.base import pooled_buffers
from bench.train.data import evaluate, pool_running_statistics_
from tests.testing.ranks import run_ranks

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


def pooled(rank: int) -> tuple[dict[str, torch.Tensor], bool]:
    net = trained(rank)
    pool_running_statistics_(net, None)
    first = {name: buffer.clone() for name, buffer in net.named_buffers()}
    pool_running_statistics_(net, None)  # of equal statistics: nothing changes
    return first, all(torch.allclose(first[name], buffer) for name, buffer in net.named_buffers())


def evaluated(rank: int) -> bool:
    """Return True if the network has this rank's own statistics after an evaluation."""
    net = trained(rank)
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    samples = Samples(inputs=inputs(rank), targets=torch.zeros(50, dtype=torch.int64))
    dataset = SimpleNamespace(
        dummy_batch=lambda n, device: torch.zeros(n, 4, device=device), normalise=lambda x: x, task=CLASSIFICATION
    )
    evaluate(net, [samples], cast(Dataset, dataset), torch.device("cpu"))
    return all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def assert_pooled(buffers: dict[str, torch.Tensor]) -> None:
    everything = torch.cat([inputs(rank) for rank in range(WORLD_SIZE)])
    torch.testing.assert_close(buffers["0.running_mean"], everything.mean(dim=0))
    # Each rank's variance divides by 49, so the pooled one has that much more of the variance within ranks.
    within = torch.stack([inputs(rank).var(dim=0) for rank in range(WORLD_SIZE)]).mean(dim=0)
    expected = everything.var(dim=0, unbiased=False) + within / 50
    torch.testing.assert_close(buffers["0.running_var"], expected)
    torch.testing.assert_close(buffers["other"], torch.full((2,), 1.0))


def test_ranks_pool_their_statistics(tmp_path: Path) -> None:
    results = run_ranks(pooled, WORLD_SIZE, tmp_path)
    for buffers, stays in results:
        assert stays
        assert_pooled(buffers)
        assert all(torch.equal(buffers[name], results[0][0][name]) for name in buffers)


def test_an_evaluation_leaves_each_rank_its_own_statistics(tmp_path: Path) -> None:
    assert run_ranks(evaluated, WORLD_SIZE, tmp_path) == [True] * WORLD_SIZE


def test_the_host_of_placed_replicas_pools_theirs() -> None:
    of_replicas = [dict(trained(rank).named_buffers()) for rank in range(WORLD_SIZE)]
    stacks = {name: torch.stack([each[name] for each in of_replicas]) for name in of_replicas[0]}
    means = lambda stacks: [stack.mean(dim=0) for stack in stacks]  # noqa: E731
    assert_pooled(pooled_buffers(stacks, ["0.running_var"], means))
