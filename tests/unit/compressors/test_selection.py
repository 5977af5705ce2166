"""Top-k of rows and groups against a stable sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressors.kernels.selection import (
    INFINITE,
    LONGEST_GROUP,
    kth_largest,
    level_bits,
    reaching,
    select_groups,
    top_k,
)
from compressors.sparse import num_kept


def reference(x: torch.Tensor, group_size: int, k: int, k_last: int) -> list[int]:
    selected = []
    for start in range(0, x.numel(), group_size):
        group = x[start : start + group_size].abs()
        count = k if group.numel() == group_size else k_last
        order = torch.sort(group, descending=True, stable=True).indices[:count]
        selected += sorted(int(i) + start for i in order)
    return selected


@settings(deadline=None, max_examples=150)
@given(
    numel=st.integers(0, 400),
    group_size=st.sampled_from([1, 2, 7, 16, 64, 100, 128, 1000]),
    ratio=st.sampled_from([0.001, 0.01, 0.1, 0.25, 1.0]),
    distinct=st.sampled_from([1, 3, 10_000]),
    seed=st.integers(0, 1000),
)
def test_groups(numel: int, group_size: int, ratio: float, distinct: int, seed: int) -> None:
    """Few distinct values make ties common; the first of equal entries must be selected."""
    x = torch.randint(-distinct, distinct + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    k, k_last = num_kept(ratio, group_size), num_kept(ratio, numel % group_size)
    assert select_groups(x, group_size, k, k_last).tolist() == reference(x, group_size, k, k_last)


@pytest.mark.parametrize("k", [1, LONGEST_GROUP - 1, LONGEST_GROUP])
def test_all_elements_of_the_longest_group_are_candidates(k: int) -> None:
    assert select_groups(torch.ones(LONGEST_GROUP), LONGEST_GROUP, k, 0).tolist() == list(range(k))


@pytest.mark.parametrize("k", [1, 10, 100, 2500, 9999, 10_000])
def test_one_long_row(k: int) -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(k)).abs()
    x[::7] = 1.0
    order = torch.sort(x, descending=True, stable=True)
    assert top_k(x, k).tolist() == sorted(order.indices[:k].tolist())
    assert kth_largest(x, k) == order.values[k - 1]


def test_nan_costs_correctness_but_never_the_count() -> None:
    for poisoned in (slice(5, 6), slice(0, 1000), slice(0, 2048)):
        x = torch.randn(2048, generator=torch.Generator().manual_seed(1))
        x[poisoned] = torch.nan
        assert select_groups(x, 1024, 10, 0).numel() == 20


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 64, 1001])
def test_positions(numel: int) -> None:
    x = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) - 0.5
    assert torch.equal(reaching(x, 0.4), (x.abs() >= 0.4).nonzero().view(-1))


def test_kept_entries_are_rounded_half_up() -> None:
    """Float products are inexact: 100 * 0.07 is above 7, 100 * 0.29 below 29."""
    given = [(0.07, 100), (0.29, 100), (0.5, 5), (0.01, 10), (1.0, 13), (0.01, 0), (0.01, 256)]
    assert [num_kept(ratio, numel) for ratio, numel in given] == [7, 29, 3, 1, 13, 0, 3]


@pytest.mark.parametrize("level", [0.0, -0.0, 1.0, 1 / 3, 1e-45, 1e-50, 3.4028235e38, 1e39, math.inf, -math.inf, -1.0])
def test_bits_of_a_level_are_those_of_the_nearest_fp32(level: float) -> None:
    nearest = torch.tensor(max(level, 0.0), dtype=torch.float32).abs()
    assert level_bits(level) == int(nearest.view(torch.int32))


def test_nan_counts_as_infinite() -> None:
    assert level_bits(math.nan) == level_bits(math.inf) == INFINITE
