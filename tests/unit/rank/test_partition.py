"""Partitions of the training samples: sizes, class shares, refusals, and what a rank keeps in memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.core.config.run import RunConfig
from bench.core.config.syntax import Partition
from bench.core.errors import UsageError
from bench.datasets.base import Samples
from bench.datasets.built_in import Digits
from bench.launch.plan import plan, with_ranks
from bench.rank import partition
from bench.rank.data import Batches, RankData, evaluation_part
from tests.testing.configs import make_config

# Ten classes of 40 to 310 samples.
LABELS = torch.arange(10).repeat_interleave(torch.arange(40, 311, 30))
LABELS = LABELS[torch.randperm(len(LABELS), generator=torch.Generator().manual_seed(0))]
NUM_SAMPLES = len(LABELS)


@pytest.mark.parametrize(
    "text", ["iid", "classes:per_rank=2", " classes : per_rank = 10 ", "dirichlet:alpha=0.5", "dirichlet:alpha=1e-3"]
)
def test_a_text_is_normalised_without_a_change_of_meaning(text: str) -> None:
    parsed = Partition.parse(text)
    assert " " not in str(parsed)
    assert Partition.parse(str(parsed)) == parsed


@pytest.mark.parametrize(
    "text",
    ["", "classes", "classes:per_rank=0", "classes:per_rank=1.5", "dirichlet:alpha=0", "dirichlet:alpha=-1",
     "dirichlet:alpha=1e9", "dirichlet:alpha=nan", "iid:alpha=1", "random"],
)  # fmt: skip
def test_other_texts_are_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="write iid, classes:per_rank=2") as refused:
        RunConfig(partition=text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("alpha", [1e-6, 0.1, 1.0, 100.0])
@pytest.mark.parametrize("num_ranks", [1, 3, 7])
def test_dirichlet_shards_cover_the_set_and_differ_by_at_most_one_sample(num_ranks: int, alpha: float) -> None:
    shards = partition.dirichlet(LABELS, num_ranks, alpha, seed=3)
    assert sorted(torch.cat(shards).tolist()) == list(range(NUM_SAMPLES))
    sizes = sorted(map(len, shards))
    assert sizes[-1] - sizes[0] <= 1


def test_a_large_alpha_is_nearly_iid_and_a_small_one_gives_one_class_after_the_other() -> None:
    skews = [
        partition.label_skew(LABELS, partition.dirichlet(LABELS, 5, alpha, seed=1)) for alpha in (1e6, 10, 1, 0.1, 1e-6)
    ]
    assert skews == sorted(skews)
    assert partition.label_skew(LABELS, partition.iid(NUM_SAMPLES, 5, seed=1)) < skews[0] < 0.1  # chance
    assert skews[-1] > 0.7
    counts = partition.class_counts(LABELS, partition.dirichlet(LABELS, 5, 1e-6, seed=1))
    # Each rank but the last takes whole classes, except for its last one, and what a rank before has left of one.
    of_all = LABELS.bincount()
    assert all(int(((row > 0) & (row < of_all)).sum()) <= 2 for row in counts[:-1])


def test_the_first_ranks_class_shares_have_the_moments_of_the_dirichlet_distribution() -> None:
    """E q = p and Var q = p (1 - p) / (alpha + 1), plus that of n draws; with equal classes none of them runs out."""
    alpha, n, labels = 20.0, 2000, torch.arange(4).repeat(10_000)
    shares = torch.stack(
        [partition.class_counts(labels, partition.dirichlet(labels, 20, alpha, seed)[:1])[0] / n for seed in range(300)]
    ).double()
    torch.testing.assert_close(shares.mean(dim=0), torch.full((4,), 0.25, dtype=torch.float64), atol=0.02, rtol=0)
    variance = 0.25 * 0.75 * (1 / (alpha + 1) + (1 - 1 / (alpha + 1)) / n)
    torch.testing.assert_close(shares.var(dim=0), torch.full((4,), variance, dtype=torch.float64), atol=0, rtol=0.3)


@pytest.mark.parametrize(("num_ranks", "per_rank"), [(5, 2), (4, 3), (10, 1), (20, 1), (1, 10), (7, 10)])
def test_with_classes_each_rank_has_few_and_all_ranks_together_have_all(num_ranks: int, per_rank: int) -> None:
    shards = partition.by_classes(LABELS, num_ranks, per_rank, seed=2)
    counts = partition.class_counts(LABELS, shards)
    assert (counts > 0).sum(dim=1).max() <= per_rank
    assert (counts.sum(dim=0) > 0).all()
    assert len(set(map(len, shards))) == 1
    together = torch.cat(shards)
    assert len(together.unique()) == len(together)


def test_equal_classes_are_used_whole() -> None:
    labels = torch.arange(10).repeat(30)
    for num_ranks, per_rank in ((5, 2), (10, 1), (10, 2)):
        shards = partition.by_classes(labels, num_ranks, per_rank, seed=1)
        assert sum(map(len, shards)) == len(labels)
        assert ((partition.class_counts(labels, shards) > 0).sum(dim=1) == per_rank).all()


@pytest.mark.parametrize("text", ["iid", "classes:per_rank=3", "dirichlet:alpha=0.3"])
def test_a_partition_follows_from_the_seed_and_leaves_the_global_generators_alone(text: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (torch.cat(partition.shards(LABELS, 4, seed, text)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_skew_is_the_mean_total_variation_distance() -> None:
    labels = torch.tensor([0, 0, 1, 1])
    whole = torch.arange(4)
    assert partition.label_skew(labels, [whole]) == 0
    assert partition.label_skew(labels, [whole[:2], whole[2:]]) == 0.5
    assert partition.label_skew(labels, [whole[:2], whole[1:3]]) == 0.25
    assert partition.label_skew(torch.arange(100), [torch.tensor([0])]) == pytest.approx(0.99)


def test_data_without_classes_can_only_be_divided_at_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Digits, "has_classes", False)
    plan(RunConfig(partition="iid"))
    with pytest.raises(UsageError, match="digits has no classes; use --partition iid"):
        plan(RunConfig(partition="dirichlet:alpha=1"))


def test_only_a_random_partition_can_change_its_number_of_ranks() -> None:
    assert with_ranks(plan(RunConfig()), 3).world_size == 3
    with pytest.raises(UsageError, match="ties samples to ranks"):
        with_ranks(plan(RunConfig(partition="dirichlet:alpha=1")), 3)


def test_a_partition_by_classes_says_that_samples_may_be_unused() -> None:
    config = plan(RunConfig(partition="classes:per_rank=2", world_size=5))
    assert any("unused_samples" in note for note in config.notes)


# What a rank keeps.


def make_samples(size: int) -> Samples:
    return Samples(inputs=torch.arange(size).view(size, 1) * 10, targets=torch.arange(size))


def test_kept_samples_are_read_by_their_indices_in_the_set() -> None:
    samples = make_samples(20)
    kept = samples.keep(torch.tensor([3, 4, 5, 17]))
    assert (len(kept), len(kept.targets), kept.num_predictions) == (20, 4, 20)
    for chosen in (torch.tensor([17, 3, 3]), slice(3, 6)):
        for found, expected in zip(kept.at(chosen), samples.at(chosen), strict=True):
            assert torch.equal(found, expected)
    assert torch.equal(kept.on(torch.device("cpu")).at(slice(4, 5))[1], torch.tensor([4]))
    for absent in (torch.tensor([6]), torch.tensor([3, 16])):
        with pytest.raises(AssertionError, match="does not keep"):
            kept.at(absent)
    assert samples.keep(torch.arange(20)) is samples


@pytest.mark.parametrize("text", ["iid", "classes:per_rank=4", "dirichlet:alpha=0.3"])
def test_a_rank_with_its_own_part_gets_the_batches_and_the_evaluation_of_one_with_all(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 3)
    dataset = Digits()
    train, test = dataset.load(Path(), seed=1)
    config = make_config(partition=text, batch_size=8, world_size=3, replicas=3)
    data = RankData.of(config, dataset, train, test)
    taken_over = torch.tensor([0, 1])
    own = data.own_part(None, [taken_over])
    assert len(own.train.targets) <= len(data.shards[1]) + 2
    assert torch.equal(own.train.at(taken_over)[0], train.at(taken_over)[0])
    assert [len(part.targets) for part in (own.test, own.train_sample)] == [150, 1000 * 2 // 3 - 1000 // 3]
    batches = [Batches(config, dataset, each.train, each.shards, 1, torch.device("cpu")) for each in (data, own)]
    for _ in range(batches[0].per_epoch + 3):
        for found, expected in zip(*map(next, batches), strict=True):
            assert torch.equal(found, expected)
    for name in ("test", "train_sample"):
        whole, part = getattr(data, name), getattr(own, name)
        place = evaluation_part(len(whole), 1, 3)
        assert part.num_predictions == whole.num_predictions
        for found, expected in zip(part.at(place), whole.at(place), strict=True):
            assert torch.equal(found, expected)


def test_a_process_that_feeds_all_replicas_keeps_all_their_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda _group=None: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda _group=None: 1)
    train = make_samples(30)
    config = dataclasses.replace(make_config(), replicas=3)
    own = RankData.of(config, Digits(), train, make_samples(5)).own_part(None, [])
    assert list(own.fed) == [0, 1, 2]
    assert own.train is train
