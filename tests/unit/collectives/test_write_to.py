"""Sums that are written once: bit-identical to adding term by term to zeros, for any division of the result."""

from __future__ import annotations

import itertools

import pytest
import torch

from collectives.payloads.base import Dense, Payload
from collectives.payloads.bundle import Bundle, UnreducedSum
from collectives.payloads.codec.index_sets import write_sum_
from collectives.payloads.group_sparse import RowSparse
from collectives.payloads.sparse import Sparse
from tests.testing.hard_numbers import hard_numbers
from tests.testing.loops import needs_loops, same

pytestmark = needs_loops

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def term(numel: int, seed: int, dtype: torch.dtype) -> Sparse:
    generator = torch.Generator().manual_seed(seed)
    values = hard_numbers(seed, most=numel)[:numel].clamp(-6e4, 6e4).to(dtype)
    positions = torch.randperm(numel, generator=generator)[: values.numel()].sort().values
    return Sparse(numel, positions, values)


def cuts(numel: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    borders = [0, *torch.randint(0, numel + 1, (seed % 5,), generator=generator).sort().values.tolist(), numel]
    return [stop - start for start, stop in itertools.pairwise(borders)]


def assert_written_as_added(total: Payload | UnreducedSum, lengths: list[int], divisor: int) -> None:
    expected, written = torch.zeros(total.numel), torch.full((total.numel,), torch.nan)
    total.add_to_(expected, divisor=divisor)
    assert total.write_to(written.split(lengths), divisor=divisor)
    if isinstance(total, Dense):  # a dense payload may contain -0
        expected, written = expected + 0, written + 0
    assert same(written, expected)


def test_terms() -> None:
    for seed in range(200):
        numel, num_terms = (1, 300, 8192, 20_011)[seed % 4], 1 + seed % 5
        terms = [term(numel, 1000 * seed + number, DTYPES[(seed + number) % 3]) for number in range(num_terms)]
        assert_written_as_added(UnreducedSum(terms), cuts(numel, seed), num_terms)


@pytest.mark.parametrize("divisor", [1, 3, 4])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_one_payload(dtype: torch.dtype, divisor: int) -> None:
    """Includes the smallest values, a third of which is a zero with a sign."""
    dense = Dense(hard_numbers(7).to(dtype))
    assert_written_as_added(dense, cuts(dense.numel, 4), divisor)
    if dtype != torch.float64:
        payload = term(20_011, 4, dtype)
        payload.values[:4] = torch.tensor([-1e-45, 1e-45, -0.0, -6e-8]).to(dtype)
        assert_written_as_added(payload, cuts(20_011, 4), divisor)


@pytest.mark.parametrize("seed", range(20))
def test_a_bundle_writes_each_member_wherever_the_parts_begin(seed: int) -> None:
    rows = RowSparse(600, torch.tensor([0, 7]), torch.randn(2, 30))  # which cannot be written in one pass
    bundle = Bundle([term(8192, seed, torch.float16), rows, Dense(torch.randn(500)), term(300, seed, torch.float32)])
    assert_written_as_added(bundle, cuts(bundle.numel, seed), 3)


@pytest.mark.parametrize("divisor", [3, 4])
def test_a_long_sum_goes_past_the_caches_wherever_its_parts_begin(divisor: int) -> None:
    numel, terms = 2**22 + 5, [term(20_011, seed, DTYPES[seed]) for seed in range(3)]
    for sent, step in zip(terms, (1, 100, 209), strict=True):
        sent.numel, sent.indices = numel, sent.indices * step
    assert_written_as_added(UnreducedSum(terms), [3, 10_000, 0, 2**21, numel - 10_003 - 2**21], divisor)


def test_every_second_entry_of_a_tensor_is_read_as_one_of_its_own_memory_is() -> None:
    positions, values = torch.tensor([1, 9, 3, 9, 5, 9, 7, 9])[::2], torch.tensor([1.0, 9, 2, 9, 3, 9, 4, 9])[::2]
    strided, expected = Sparse(8, positions, values), torch.tensor([0.0, 1, 0, 2, 0, 3, 0, 4])
    written, column = torch.empty(8), torch.zeros(8, 2)
    assert UnreducedSum([strided, strided]).write_to([written], divisor=2)
    strided.add_to_(column[:, 1])
    assert torch.equal(written, expected)
    assert torch.equal(strided.to_dense(), expected)
    assert torch.equal(column[:, 1], expected)


def test_other_types_and_layouts_are_left_to_others_and_positions_that_do_not_ascend_refused() -> None:
    payload, around = term(10, 1, torch.float32), torch.zeros(30)
    assert not write_sum_([payload.values], [payload.positions], [torch.zeros(10, dtype=torch.float64)], divisor=1)
    assert not write_sum_([payload.values], [payload.positions], [torch.zeros(20)[::2]], divisor=1)
    payload.indices, payload.values = torch.tensor([3, 2, 12]), torch.ones(3)
    with pytest.raises(IndexError, match="ascend"):
        write_sum_([payload.values], [payload.positions], [around[10:20]], divisor=1)
    assert not around[:10].any()
    assert not around[20:].any()
