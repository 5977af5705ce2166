"""Bandwidths of an all-reduce, computed by hand."""

from __future__ import annotations

import pytest

from bench.extensions.microbenchmarks.collectives_worker import bandwidths


def test_algorithm_bandwidth_is_bytes_over_time() -> None:
    assert bandwidths(10_000_000, 0.02, 4)[0] == 500e6


@pytest.mark.parametrize(
    ("world_size", "factor"), [(1, 0.0), (2, 1.0), (3, 4 / 3), (4, 1.5), (8, 1.75), (1024, 1.998046875)]
)
def test_bus_bandwidth_counts_what_each_rank_must_send(world_size: int, factor: float) -> None:
    assert bandwidths(1_000_000_000, 1.0, world_size)[1] == pytest.approx(factor * 1e9, rel=1e-12)


def test_the_figures_of_a_ring_that_fills_its_link() -> None:
    """4 ranks with 1 GB/s in each direction: a ring sends 2 x 3/4 x 8 MB = 12 MB per rank, which takes 12 ms."""
    assert bandwidths(8_000_000, 0.012, 4)[1] == pytest.approx(1e9)
