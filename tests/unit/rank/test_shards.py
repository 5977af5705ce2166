"""Shards are disjoint and cover the set, and batches depend only on seed, rank and epoch."""

from __future__ import annotations

import pytest
import torch

from bench.rank import data, partition


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_samples", [7, 100, 1347])
def test_shards_are_disjoint_and_cover_the_set(num_samples: int, world_size: int) -> None:
    parts = partition.iid(num_samples, world_size, seed=3)
    assert sorted(torch.cat(parts).tolist()) == list(range(num_samples))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("num_samples", [5, 10, 449])
def test_evaluation_parts_are_disjoint_and_cover_the_set(num_samples: int, world_size: int) -> None:
    seen: list[int] = []
    for rank in range(world_size):
        seen += range(num_samples)[data.evaluation_part(num_samples, rank, world_size)]
    assert seen == list(range(num_samples))


def test_every_rank_can_make_the_same_number_of_steps() -> None:
    assert data.steps_per_epoch(1347, 2, 32) == 21
    assert data.steps_per_epoch(10, 3, 4) == 0
    smallest = min(map(len, partition.iid(1347, 2, seed=1)))
    assert smallest // 32 == 21


def test_an_epoch_uses_each_sample_of_the_shard_at_most_once() -> None:
    own = partition.iid(100, 3, seed=5)[1]
    used = data.order(own, seed=5, rank=1, epoch=0).tolist()
    assert len(used) == len(own)
    assert set(used) == set(own.tolist())


def test_order_depends_on_seed_rank_and_epoch_and_on_nothing_else() -> None:
    own = torch.arange(64)

    def order(**where: int) -> list[int]:
        return data.order(own, **where).tolist()

    first = order(seed=1, rank=0, epoch=0)
    torch.manual_seed(99)
    assert order(seed=1, rank=0, epoch=0) == first
    others = [order(seed=2, rank=0, epoch=0), order(seed=1, rank=1, epoch=0), order(seed=1, rank=0, epoch=1)]
    assert len({tuple(o) for o in [first, *others]}) == 4


def test_the_global_generator_is_not_touched() -> None:
    before = torch.get_rng_state()
    data.order(partition.iid(50, 2, seed=1)[0], seed=1, rank=0, epoch=0)
    data.augmentation_generator(1, 0, 0)
    assert torch.equal(torch.get_rng_state(), before)
