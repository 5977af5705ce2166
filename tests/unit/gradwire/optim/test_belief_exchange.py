"""Max-AdaBelief among ranks: the exchanged values, and their relation to the values of each rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from bench.optimizers.gradwire_optimizers import UseMaxAdaBelief
from compressors.topk import TopK
from tests.testing.belief_ranks import SHAPES, Rank, Tensors, noisy, set_gradients, trained
from tests.testing.memory_transport import MemoryTransport, run_threads


@pytest.mark.parametrize("reduce", ["mean", "s_max", "sum"])
def test_maxima_never_fall(reduce: str) -> None:
    def train(transport: MemoryTransport) -> None:
        rank = Rank(transport, UseMaxAdaBelief(reduce=reduce))  # type: ignore[arg-type]
        own = []
        for _ in rank.train(noisy, 50):
            own.append(rank.state("maximum"))
        for history in (own, rank.maxima):
            for before, after in itertools.pairwise(history):
                assert all(bool((a >= b).all()) for a, b in zip(after, before, strict=True))
        assert any(bool((a > b).any()) for a, b in zip(own[-1], own[1], strict=True))

    run_threads(train, 3)


def test_the_larger_of_two_variances_falls_again() -> None:
    def train(transport: MemoryTransport) -> None:
        rank = Rank(transport, UseMaxAdaBelief(max_of="previous", beta2=0.9))
        for _ in rank.train(noisy, 50):
            pass
        assert any(bool((after[0] < before[0]).any()) for before, after in itertools.pairwise(rank.maxima))

    run_threads(train, 2)


@pytest.mark.parametrize(("max_over", "falls"), [("raw", True), ("corrected", False)])
def test_only_the_corrected_maximum_makes_a_divisor_that_never_falls(max_over: str, falls: bool) -> None:
    def train(transport: MemoryTransport) -> None:
        rank = Rank(transport, UseMaxAdaBelief(max_over=max_over))  # type: ignore[arg-type]
        for _ in rank.train(noisy, 100):
            pass
        corrections = [1.0 if max_over == "corrected" else 1 - 0.999**t for t in range(1, 101)]
        divisors = [maxima[0] / correction for maxima, correction in zip(rank.maxima, corrections, strict=True)]
        assert any(bool((after < before).any()) for before, after in itertools.pairwise(divisors)) is falls

    run_threads(train, 2)


def test_a_merged_maximum_is_equal_on_all_ranks_and_a_local_one_is_not() -> None:
    for recursion, count in (("local", 3), ("merged", 1)):

        def train(transport: MemoryTransport, recursion: str = recursion) -> bytes:
            rank = Rank(transport, UseMaxAdaBelief(recursion=recursion))  # type: ignore[arg-type]
            for _ in rank.train(noisy, 5):
                pass
            return rank.state("maximum")[0].numpy().tobytes()

        assert len(set(run_threads(train, 3))) == count


def test_what_is_exchanged_beside_the_averaged_gradient() -> None:
    """The mean equals that of the averaged gradient; the maximum is at least as large: it includes the spread."""

    def averaged(rank: int, step: int) -> Tensors:
        return [torch.stack(parts).mean(0) for parts in zip(*(noisy(other, step) for other in range(3)), strict=True)]

    def train(transport: MemoryTransport) -> None:
        ranks = [Rank(transport, UseMaxAdaBelief(eps_mode="outside"), torch.float64) for _ in range(2)]
        for rank, gradient_of in zip(ranks, (noisy, averaged), strict=True):
            rank.in_float64()
            for _ in rank.train(gradient_of, 30):
                pass
        apart, together = ranks
        for step in range(30):
            for ours, theirs in zip(apart.means[step], together.means[step], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
            for ours, theirs in zip(apart.maxima[step], together.maxima[step], strict=True):
                assert bool((ours >= theirs).all())
                assert bool((ours > theirs * 1.1).any())

    run_threads(train, 3)


@pytest.mark.parametrize("n", [2, 4])
def test_ranks_with_equal_data_are_one_rank(n: int) -> None:
    def same(rank: int, step: int) -> Tensors:
        return noisy(0, step)

    (alone,) = trained(lambda transport: Rank(transport, UseMaxAdaBelief()), same, 20, 1)
    for history in trained(lambda transport: Rank(transport, UseMaxAdaBelief()), same, 20, n):
        for ours, theirs in zip(history, alone, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_means_are_compressed_with_error_feedback_and_maxima_are_not() -> None:
    def train(transport: MemoryTransport) -> list[Tensors]:
        compressor = TopK(ratio=0.1, value_dtype="fp32")
        rank = Rank(transport, UseMaxAdaBelief(), compressor=compressor, collective="allgather")
        history = list(rank.train(noisy, 12))
        whole = Rank(transport, UseMaxAdaBelief(), collective="allgather")
        for _ in whole.train(noisy, 12):
            pass
        for ours, theirs in zip(rank.maxima, whole.maxima, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert all(int((means[0] != 0).sum()) <= 14 for means in rank.means)  # 7 entries of each of two ranks
        sent, meant = (sum(means[0] for means in each.means) for each in (rank, whole))
        waiting = rank.channel.residual_norms()
        assert waiting[0] > 0
        assert float((torch.as_tensor(sent) - torch.as_tensor(meant)).norm()) <= waiting[0] * 2
        return history

    first, second = run_threads(train, 2)
    for ours, theirs in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_parameter_without_gradient_takes_part_with_zeros() -> None:
    def train(transport: MemoryTransport) -> tuple[Tensors, Tensors]:
        results = []
        for absent in (None, torch.zeros(())):
            rank = Rank(transport, UseMaxAdaBelief())
            for _ in rank.train(noisy, 3):
                pass
            set_gradients(rank.model, noisy(transport.rank, 3))
            if transport.rank == 1:
                rank.model.weights[1].grad = None if absent is None else torch.zeros(SHAPES[1])
            rank.optimizer.step()
            results.append([parameter.detach() for parameter in rank.model.parameters()])
        return results[0], results[1]

    for without, zeros in run_threads(train, 2):
        assert all(torch.equal(a, b) for a, b in zip(without, zeros, strict=True))
