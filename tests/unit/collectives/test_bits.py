"""Bit packing against Python's own integers, and what codes stand for."""

from __future__ import annotations

import itertools

import pytest
import torch

from collectives.payloads.base import PayloadError
from collectives.payloads.codec.bits import (
    First,
    bits_for,
    find_codebook,
    pack_bits,
    packed_nbytes,
    unpack_bits,
)
from tests.testing.payloads import packed_codes


def reference(codes: list[int], bits: int, first: First) -> bytes:
    """Return the stream as one big integer."""
    nbytes = -(-len(codes) * bits // 8)
    if first == "low":
        return sum(code << i * bits for i, code in enumerate(codes)).to_bytes(nbytes, "little")
    stream = 0
    for code in codes:
        stream = stream << bits | code
    return (stream << nbytes * 8 - len(codes) * bits).to_bytes(nbytes, "big")


def random_codes(count: int, bits: int) -> torch.Tensor:
    codes = torch.randint(2**bits, (count,), generator=torch.Generator().manual_seed(count + bits))
    if count:
        codes[-1] = 2**bits - 1
    return codes


@pytest.mark.parametrize("first", ["low", "high"])
@pytest.mark.parametrize("bits", range(33))
def test_every_width_packs_like_a_big_integer_and_comes_back(bits: int, first: First) -> None:
    for count in (0, 1, 2, 3, 7, 8, 9, 33, 65):
        codes = random_codes(count, bits)
        packed = pack_bits(codes, bits, first=first)
        assert packed.numel() == packed_nbytes(count, bits)
        assert bytes(packed.tolist()) == reference(codes.tolist(), bits, first)
        assert torch.equal(unpack_bits(packed, count, bits, first=first), codes)


def test_only_the_low_bits_of_a_code_of_any_integer_type_count() -> None:
    for bits, dtype in itertools.product((1, 2, 3, 4, 8, 10), (torch.uint8, torch.int16, torch.int32, torch.int64)):
        codes = torch.tensor([-1, 2**bits, -3, 5]).to(dtype)
        assert unpack_bits(pack_bits(codes, bits), 4, bits).tolist() == [code % 2**bits for code in codes.tolist()]


def test_unpacking_ignores_what_lies_behind() -> None:
    packed = torch.cat([pack_bits(random_codes(9, 10), 10), torch.full((40,), 255, dtype=torch.uint8)])
    assert torch.equal(unpack_bits(packed, 9, 10), random_codes(9, 10))


def test_bits_for() -> None:
    assert [bits_for(n) for n in (0, 1, 2, 3, 4, 5, 256, 257, 1024, 1025)] == [0, 0, 1, 2, 2, 3, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("codebook", "bits", "values"),
    [
        ("sign", 1, [-1, 1]),
        ("ternary", 2, [0, 0, -1, 1]),
        ("levels", 2, [0, 1, -2, -1]),
        ("levels", 4, [0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1]),
        (
            "natural",
            4,
            [0, 1, 0.5, 0.25, 2**-3, 2**-4, 2**-5, 2**-6, 0, -1, -0.5, -0.25, -(2**-3), -(2**-4), -(2**-5), -(2**-6)],
        ),
    ],
)
def test_codebooks(codebook: str, bits: int, values: list[float]) -> None:
    assert find_codebook(codebook).values(bits).tolist() == values
    codes = torch.arange(2**bits)
    payload = packed_codes(codes, codebook=codebook, bits=bits, scales=torch.tensor([0.5]))
    assert payload.to_dense().tolist() == [value / 2 for value in values]


def test_natural_reaches_the_smallest_normal_number() -> None:
    values = find_codebook("natural").values(8)
    assert values[127] == torch.finfo(torch.float32).smallest_normal
    assert (values[1:127] == 2 * values[2:128]).all()


def test_negative_levels_may_be_given_as_they_are() -> None:
    levels = torch.tensor([-7, -1, 0, 3, 7])
    payload = packed_codes(levels, codebook="levels", bits=4, scales=torch.tensor([2.0]))
    assert payload.to_dense().tolist() == [-14, -2, 0, 6, 14]


def test_an_unknown_codebook_is_refused_with_the_names_of_all() -> None:
    with pytest.raises(PayloadError, match="sign, ternary, levels, natural"):
        find_codebook("new")


def test_blocks_have_their_own_scale() -> None:
    codes = torch.ones(10, dtype=torch.uint8)
    scales = torch.tensor([1.0, 2.0, 3.0])
    payload = packed_codes(codes, codebook="levels", bits=4, scales=scales, block_numel=4)
    assert payload.to_dense().tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3]
    assert payload.alignment == 4
    assert payload.slice(4, 10).to_dense().tolist() == [2, 2, 2, 2, 3, 3]
