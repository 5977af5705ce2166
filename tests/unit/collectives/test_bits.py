"""Bit packing against Python's own integers."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads.codec.bits import First, bits_for, pack_bits, packed_nbytes, unpack_bits


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_codes_may_come_in_any_integer_type(dtype: torch.dtype) -> None:
    codes = torch.tensor([1, 0, 63, 5, 62], dtype=dtype)
    assert unpack_bits(pack_bits(codes, 6), 5, 6).tolist() == [1, 0, 63, 5, 62]


def test_only_the_low_bits_of_a_code_count() -> None:
    for bits in (1, 2, 3, 4, 8, 10):
        codes = torch.tensor([-1, 2**bits, -3, 5], dtype=torch.int16)
        assert unpack_bits(pack_bits(codes, bits), 4, bits).tolist() == [code % 2**bits for code in codes.tolist()]


def test_unpacking_ignores_what_lies_behind() -> None:
    packed = torch.cat([pack_bits(random_codes(9, 10), 10), torch.full((40,), 255, dtype=torch.uint8)])
    assert torch.equal(unpack_bits(packed, 9, 10), random_codes(9, 10))


def test_mxnet_two_bit_layout() -> None:
    """[+t, -t, 0, +t] as 11 10 00 11, first value in the top bits."""
    assert pack_bits(torch.tensor([3, 2, 0, 3]), 2, first="high").tolist() == [0xE3]


def test_ten_bits_by_hand() -> None:
    """1 | 2 << 10 | 3 << 20 | 1023 << 30 = 0xFFC0300801, five bytes, lowest first."""
    assert pack_bits(torch.tensor([1, 2, 3, 1023]), 10).tolist() == [0x01, 0x08, 0x30, 0xC0, 0xFF]


def test_bits_for() -> None:
    assert [bits_for(n) for n in (0, 1, 2, 3, 4, 5, 256, 257, 1024, 1025)] == [0, 0, 1, 2, 2, 3, 8, 9, 10, 11]
