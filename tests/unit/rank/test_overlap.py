"""Overlap of index sets: computed by hand, and sampled as over a model."""

from __future__ import annotations

import pytest
import torch

from bench.rank.overlap import MAX_POSITIONS, mean_overlap, sample_index_sets, sampled_overlap, support
from collectives.payloads import Sparse
from tests.testing.compressor_cases import alone, case, layers_of_shapes, reduce_once, step_at


def sparse(numel: int, *positions: int) -> Sparse:
    return Sparse(numel, torch.tensor(positions, dtype=torch.int64), torch.ones(len(positions)))


def test_overlap_by_hand() -> None:
    a, b, c = (support(sparse(9, *positions)) for positions in [(0, 1, 2), (2, 3), (8,)])
    assert mean_overlap([a, b]) == pytest.approx(2 * 1 / (3 + 2))
    assert mean_overlap([a, b, c]) == pytest.approx((2 / 5 + 0 + 0) / 3)
    assert mean_overlap([a, a]) == 1
    assert mean_overlap([support(sparse(3))] * 2) is None


def test_a_small_model_is_looked_at_whole() -> None:
    ranks = [{(0,): sparse(9, 0, 1, 2), (1, 2): sparse(5, 4)}, {(0,): sparse(9, 2, 3), (1, 2): sparse(5, 4)}]
    assert sampled_overlap([sample_index_sets(rank, 14) for rank in ranks]) == pytest.approx(2 * 2 / (4 + 3))


def test_what_some_rank_sends_whole_is_left_out() -> None:
    ranks = [{(0,): sparse(9, 0, 1)}, {(0,): sparse(9, 1), (1,): sparse(4, 0)}]  # the first rank sends layer 1 whole
    assert sampled_overlap([sample_index_sets(rank, 13) for rank in ranks]) == pytest.approx(2 * 1 / (2 + 1))
    assert sampled_overlap([{}, {}]) is None


@pytest.mark.parametrize(("compressor", "is_kept"), [("topk", True), ("sign", False), ("bf16", False)])
def test_only_what_leaves_elements_out_is_kept_until_the_next_step(compressor: str, is_kept: bool) -> None:
    made = case(compressor).reducer()
    layers = layers_of_shapes((20, 55))
    reduce_once(made, alone(), layers, [torch.randn(1100)], step_at(5))
    assert bool(made.last_encoded) == is_kept
    reduce_once(made, alone(), layers, [torch.randn(1100)], step_at(6), commit=False)
    kept = dict(made.last_encoded)
    made.drop()
    assert made.last_encoded == kept


def test_a_large_model_is_sampled_alike_on_all_ranks() -> None:
    numel, kept = 4 * MAX_POSITIONS, 40_000
    order = torch.randperm(numel, generator=torch.Generator().manual_seed(1))
    both, one, other = order[: kept // 2], order[kept // 2 : kept], order[kept : kept + kept // 2]
    ranks = [{(0,): sparse(numel, *torch.cat([both, own]).sort().values.tolist())} for own in (one, other)]
    samples = [sample_index_sets(rank, numel) for rank in ranks]
    assert sampled_overlap(samples) == pytest.approx(0.5, abs=0.03)  # the sample contains 10 000 entries
    assert len(next(iter(samples[0].values()))) < MAX_POSITIONS / 8 / 2  # sparse bits are compressed
    assert sampled_overlap([samples[0], samples[0]]) == 1
