"""Index sets: codings, their sizes, their union."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads.codec.index_sets import (
    CODINGS,
    Coding,
    add_index_sets,
    cheapest_coding,
    coding_nbytes,
    decode_indices,
    encode_indices,
    index_set_nbytes,
)
from collectives.payloads.fields import PayloadError, Reader, lay_out
from tests.testing.payloads import DEVICES

UNIVERSES = (1, 2, 3, 8, 255, 256, 257, 1023, 65535, 65536, 65537, 100_003)


def random_support(count: int, universe: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count * 7 + universe)
    return torch.randperm(universe, generator=generator)[:count].sort().values


def through_the_wire(indices: torch.Tensor, universe: int, coding: Coding) -> torch.Tensor:
    packed = lay_out(encode_indices(indices, universe, coding), indices.device)
    assert packed.numel() == coding_nbytes(coding, indices.numel(), universe)
    return decode_indices(Reader(packed), indices.numel(), universe, coding)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("universe", UNIVERSES)
def test_every_coding_brings_every_support_back(universe: int, coding: Coding, device: str) -> None:
    for count in sorted({0, 1, 2, universe // 100, universe // 3, universe - 1, universe} & set(range(universe + 1))):
        indices = random_support(count, universe).to(device)
        assert torch.equal(through_the_wire(indices, universe, coding), indices)
    for outermost in ([0, universe - 1], [universe - 2, universe - 1]) if universe > 2 else ():
        indices = torch.tensor(outermost).to(device)
        assert torch.equal(through_the_wire(indices, universe, coding), indices)


@pytest.mark.parametrize(
    ("coding", "count", "universe", "nbytes"),
    [
        ("coo", 10, 256, 10),
        ("coo", 10, 257, 20),
        ("coo", 10, 65536, 20),
        ("coo", 10, 65537, 40),
        ("bitmap", 10, 1025, 129),
        ("elias_fano", 10, 1000, 12),  # low 6 bits: 60 bits, 8 bytes; unary: 10 ones and 999 >> 6 = 15 steps, 4 bytes
        ("elias_fano", 3, 4, 1),  # no low bits; unary: 3 + 3 bits
    ],
)
def test_sizes_by_hand(coding: Coding, count: int, universe: int, nbytes: int) -> None:
    assert coding_nbytes(coding, count, universe) == nbytes


def test_elias_fano_by_hand() -> None:
    """[3, 4, 13] of 16: low 2 bits 11 00 01 -> 0b010011; high parts 0 1 3 -> ones at bits 0, 2, 5."""
    assert lay_out(encode_indices(torch.tensor([3, 4, 13]), 16, "elias_fano"), torch.device("cpu")).tolist() == [
        0b010011,
        0b100101,
    ]


def test_the_cheapest_coding_changes_with_density() -> None:
    assert cheapest_coding(1, 200) == "coo"
    assert cheapest_coding(100, 100_000) == "elias_fano"
    assert cheapest_coding(40_000, 100_000) == "bitmap"
    for count in (1, 10, 1000, 10_000, 50_000, 99_999):
        assert index_set_nbytes(count, 100_000) == min(coding_nbytes(coding, count, 100_000) for coding in CODINGS)


def test_elias_fano_is_near_the_information_bound() -> None:
    """1 % of a million: the entropy of the index set is 80 kbit; the coding needs less than 0.6 bits per index more."""
    bits = 8 * index_set_nbytes(10_000, 1_000_000)
    bound = (
        torch.lgamma(torch.tensor([1e6 + 1, 1e4 + 1, 99e4 + 1], dtype=torch.float64)) / torch.log(torch.tensor(2.0))
    ).tolist()
    assert bits < bound[0] - bound[1] - bound[2] + 0.6 * 10_000


@pytest.mark.parametrize("coding", CODINGS)
def test_damage_is_noticed(coding: Coding) -> None:
    indices = random_support(50, 300)
    packed = lay_out(encode_indices(indices, 300, coding), indices.device)
    with pytest.raises(PayloadError, match="cut short"):
        decode_indices(Reader(packed[:-1]), 50, 300, coding)
    with pytest.raises(PayloadError):
        decode_indices(Reader(torch.full_like(packed, 255)), 50, 300, coding)
    with pytest.raises(PayloadError):
        decode_indices(Reader(torch.zeros_like(packed)), 50, 300, coding)


def test_unsorted_and_repeated_indices_are_refused() -> None:
    for indices in ([3, 2], [2, 2], [1, 7]):
        packed = torch.tensor(indices, dtype=torch.uint8)
        with pytest.raises(PayloadError, match=r"ascend strictly within 0\.\.6"):
            decode_indices(Reader(packed), 2, 7, "coo")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("num_a", "num_b"), [(0, 0), (0, 5), (5, 0), (1, 1), (300, 200), (1000, 1000), (1, 999)])
def test_union(num_a: int, num_b: int, dtype: torch.dtype, device: str) -> None:
    a, b = random_support(num_a, 1000).to(device), random_support(num_b + 1, 1000)[:num_b].to(device)
    values_a, values_b = torch.randn(num_a, device=device).to(dtype), torch.randn(num_b, device=device).to(dtype)
    indices, values = add_index_sets(a, values_a, b, values_b)
    assert indices.tolist() == sorted({*a.tolist(), *b.tolist()})
    wide = torch.promote_types(dtype, torch.float32)
    dense = torch.zeros(1000, dtype=wide, device=device)
    dense[a] = values_a.to(wide)
    dense[b] += values_b.to(wide)
    assert values.dtype == dtype
    assert torch.equal(values, dense[indices].to(dtype))


def test_rows_add_as_well_and_cancelled_values_stay() -> None:
    rows, values = add_index_sets(
        torch.tensor([1, 4]), torch.ones(2, 3), torch.tensor([0, 4]), torch.tensor([[1.0, 2, 3], [-1, 5, 6]])
    )
    assert rows.tolist() == [0, 1, 4]
    assert values.tolist() == [[1, 2, 3], [1, 1, 1], [0, 6, 7]]
