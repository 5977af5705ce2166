"""Divide the training samples among ranks: evenly at random, by classes, or with class shares of a Dirichlet draw.

A partition is a list of shards: for each rank, the int64 indices of its samples. Labels, number of ranks and seed
determine the partition, so every rank computes the same one.

Shards are disjoint, and their sizes differ by at most one sample. So every rank makes the same number of steps per
epoch, with batches of equal size, and the mean of the ranks' gradients is the mean over all samples of the step.
"""

from collections.abc import Sequence

import numpy as np
import torch

from bench.core.config.syntax import Partition


def shards(targets: torch.Tensor, num_ranks: int, seed: int, partition: str = "iid") -> list[torch.Tensor]:
    """Return the shard of each rank.

    Args:
        targets: the training samples' targets; for a partition other than iid, class labels, int64 [num_samples].
        num_ranks: number of ranks, or of replicas.
        seed: the run's seed.
        partition: the value of --partition.
    """
    parsed = Partition.parse(partition)
    if parsed.per_rank is not None:
        return by_classes(targets, num_ranks, parsed.per_rank, seed)
    if parsed.alpha is not None:
        return dirichlet(targets, num_ranks, parsed.alpha, seed)
    return iid(len(targets), num_ranks, seed)


def iid(num_samples: int, num_ranks: int, seed: int) -> list[torch.Tensor]:
    """Return shards that cover all samples: each is every num_ranks-th sample of one random permutation."""
    permutation = torch.randperm(num_samples, generator=random_generator(seed, 0, 0))
    return [permutation[rank::num_ranks] for rank in range(num_ranks)]


def by_classes(labels: torch.Tensor, num_ranks: int, per_rank: int, seed: int) -> list[torch.Tensor]:
    """Return shards with samples of at most `per_rank` classes each.

    The classes are shuffled and dealt to the ranks in turn, `per_rank` to each. Ranks that share a class get equal
    parts of it. All shards are cut to the size of the smallest, so some samples may belong to no rank.

    Args:
        labels: class labels, int64 [num_samples].
        num_ranks: number of ranks; `num_ranks` x `per_rank` is at least the number of classes.
        per_rank: number of classes of each rank.
        seed: the run's seed.
    """
    random = _random(seed)
    members = [random.permutation(part) for part in _members(labels)]
    places = np.arange(num_ranks * per_rank) % len(members)
    dealt = random.permutation(len(members))[places].reshape(num_ranks, per_rank)
    parts: list[list[np.ndarray]] = [[] for _ in range(num_ranks)]
    for label, samples in enumerate(members):
        holders = [rank for rank, classes in enumerate(dealt) if label in classes]
        for rank, part in zip(holders, np.array_split(samples, len(holders)), strict=True):
            parts[rank].append(part)
    whole = [random.permutation(np.concatenate(of_rank)) for of_rank in parts]
    smallest = min(map(len, whole))
    return [torch.from_numpy(shard[:smallest]) for shard in whole]


def dirichlet(labels: torch.Tensor, num_ranks: int, alpha: float, seed: int) -> list[torch.Tensor]:
    """Return shards that cover all samples, with class shares of each rank drawn from a Dirichlet distribution.

    Source: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification" (2019), arXiv:1909.06335, "Synthetic Non-Identical Client Data": each client draws q ~ Dir(alpha p),
    where p are the class shares of the whole set, and takes samples of the classes with probabilities q, without
    replacement. A class that has run out is left out, and q is renormalised.

    The last rank gets the samples that the other ranks leave, so its class shares are not drawn freely.

    Args:
        labels: class labels, int64 [num_samples].
        num_ranks: number of ranks.
        alpha: concentration. With a large alpha, the shards are close to a random partition; with an alpha near 0, a
            rank takes the samples of one class after the other.
        seed: the run's seed.
    """
    random = _random(seed)
    members = [random.permutation(part) for part in _members(labels)]
    left = np.array([len(samples) for samples in members])
    concentration = alpha * left / len(labels)
    result = []
    for rank in range(num_ranks):
        # Compute log q, because a small alpha would make q itself 0. If G is Gamma(a + 1) and U is uniform, then
        # G U^(1/a) is Gamma(a).
        uniform = 1 - random.random_sample(len(left))
        log_q = np.log(random.standard_gamma(concentration + 1)) + np.log(uniform) / concentration
        size = len(labels) // num_ranks + (rank < len(labels) % num_ranks)
        taken = np.zeros_like(left)
        while missing := size - int(taken.sum()):
            (available,) = np.nonzero(left > taken)
            q = np.exp(log_q[available] - log_q[available].max())
            drawn = random.multinomial(missing, q / q.sum())
            taken[available] += np.minimum(drawn, (left - taken)[available])
        parts = [samples[:count] for samples, count in zip(members, taken, strict=True)]
        members = [samples[count:] for samples, count in zip(members, taken, strict=True)]
        left = left - taken
        result.append(torch.from_numpy(np.concatenate(parts)))
    return result


def _members(labels: torch.Tensor) -> list[np.ndarray]:
    """Return the int64 indices of the samples of each class that has samples."""
    return [(labels == label).nonzero().flatten().numpy() for label in labels.unique()]


def _random(seed: int) -> np.random.RandomState:
    # Unlike newer generators, RandomState draws the same numbers in every version of NumPy.
    return np.random.RandomState(seed)


def class_counts(labels: torch.Tensor, of_ranks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the number of samples of each class in each shard, int64 [num_ranks, num_classes]."""
    num_classes = int(labels.max()) + 1
    return torch.stack([labels[shard].bincount(minlength=num_classes) for shard in of_ranks])


def label_skew(labels: torch.Tensor, of_ranks: Sequence[torch.Tensor]) -> float:
    """Return how much the class shares on a rank differ from those of all samples, 0 (equal) to 1 (disjoint).

    The result is the mean over ranks of the total variation distance: half the sum of the absolute differences.
    """
    counts = class_counts(labels, of_ranks).double()
    shares = counts / counts.sum(dim=1, keepdim=True)
    of_all = labels.bincount().double() / len(labels)
    return float((shares - of_all).abs().sum(dim=1).mean() / 2)


def random_generator(seed: int, stream: int, epoch: int) -> torch.Generator:
    """Return the random generator for one purpose (stream) and epoch of a run."""
    # Seed with a hash of the tuple, so that neighbouring seeds, ranks and epochs get different random numbers.
    mixed = seed & 0xFFFFFFFF
    for word in (stream, epoch):
        mixed = (mixed * 6364136223846793005 + (word & 0xFFFFFFFF) * 1442695040888963407 + 1) & 0x7FFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return torch.Generator().manual_seed(mixed)
