"""Sums that are written once: bit-identical to adding term by term to zeros, for any division of the result."""

from __future__ import annotations

import itertools

import pytest
import torch

from collectives.payloads.base import Dense
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


def test_it_has_the_bits_of_adding_term_by_term() -> None:
    for seed in range(200):
        numel, num_terms = (1, 300, 8192, 20_011)[seed % 4], 1 + seed % 5
        terms = [term(numel, 1000 * seed + number, DTYPES[(seed + number) % 3]) for number in range(num_terms)]
        total, expected = UnreducedSum(terms), torch.zeros(numel)
        total.add_to_(expected, divisor=num_terms)
        written = torch.full((numel,), torch.nan)
        assert total.write_to(written.split(cuts(numel, seed)), divisor=num_terms)
        assert same(written, expected)


@pytest.mark.parametrize("divisor", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_payload_is_written_as_it_would_be_added_to_zeros(dtype: torch.dtype, divisor: int) -> None:
    """Includes the smallest values, a third of which is a zero with a sign."""
    payload, expected = term(20_011, 4, dtype), torch.zeros(20_011)
    payload.values[:4] = torch.tensor([-1e-45, 1e-45, -0.0, -6e-8]).to(dtype)
    payload.add_to_(expected, divisor=divisor)
    written = torch.full((20_011,), torch.nan)
    assert payload.write_to(written.split(cuts(20_011, 4)), divisor=divisor)
    assert same(written, expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_bundle_writes_each_member_wherever_the_parts_begin(seed: int) -> None:
    rows = RowSparse(600, torch.tensor([0, 7]), torch.randn(2, 30))  # which cannot be written in one pass
    bundle = Bundle([term(8192, seed, torch.float16), rows, Dense(torch.randn(500)), term(300, seed, torch.float32)])
    expected, written = torch.zeros(bundle.numel), torch.full((bundle.numel,), torch.nan)
    bundle.add_to_(expected, divisor=3)
    assert bundle.write_to(written.split(cuts(bundle.numel, seed)), divisor=3)
    assert same(written, expected)


@pytest.mark.parametrize("divisor", [3, 4])
def test_a_long_sum_goes_past_the_caches_wherever_its_parts_begin(divisor: int) -> None:
    numel, terms = 2**22 + 5, [term(20_011, seed, DTYPES[seed]) for seed in range(3)]
    for sent, step in zip(terms, (1, 100, 209), strict=True):
        sent.numel, sent.indices = numel, sent.indices * step
    total, expected = UnreducedSum(terms), torch.zeros(numel)
    total.add_to_(expected, divisor=divisor)
    written = torch.full((numel,), torch.nan)
    assert total.write_to(written.split([3, 10_000, 0, 2**21, numel - 10_003 - 2**21]), divisor=divisor)
    assert same(written, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("divisor", [1, 3, 4])
def test_a_dense_sum_is_written_as_it_would_be_added_to_zeros(dtype: torch.dtype, divisor: int) -> None:
    total, expected = Dense(hard_numbers(7).to(dtype)), torch.zeros(hard_numbers(7).numel())
    total.add_to_(expected, divisor=divisor)
    written = torch.full_like(expected, torch.nan)
    assert total.write_to(written.split(cuts(total.numel, 4)), divisor=divisor)
    assert same(written + 0, expected + 0)


def test_every_second_entry_of_a_tensor_is_read_as_one_of_its_own_memory_is() -> None:
    positions, values = torch.tensor([1, 9, 3, 9, 5, 9, 7, 9])[::2], torch.tensor([1.0, 9, 2, 9, 3, 9, 4, 9])[::2]
    strided, expected = Sparse(8, positions, values), torch.tensor([0.0, 1, 0, 2, 0, 3, 0, 4])
    written, column = torch.empty(8), torch.zeros(8, 2)
    assert UnreducedSum([strided, strided]).write_to([written], divisor=2)
    strided.add_to_(column[:, 1])
    assert torch.equal(written, expected)
    assert torch.equal(strided.to_dense(), expected)
    assert torch.equal(column[:, 1], expected)


def test_positions_that_do_not_ascend_are_an_error_and_nothing_outside_is_written() -> None:
    around = torch.zeros(30)
    payload = term(10, 1, torch.float32)
    payload.indices, payload.values = torch.tensor([3, 2, 12]), torch.ones(3)
    with pytest.raises(IndexError, match="ascend"):
        write_sum_([payload.values], [payload.positions], [around[10:20]], divisor=1)
    assert not around[:10].any()
    assert not around[20:].any()


def test_other_types_and_layouts_are_left_to_others() -> None:
    payload = term(10, 1, torch.float32)
    assert not write_sum_([payload.values], [payload.positions], [torch.zeros(10, dtype=torch.float64)], divisor=1)
    assert not write_sum_([payload.values], [payload.positions], [torch.zeros(20)[::2]], divisor=1)
