"""Arithmetic in the dtype that is sent, and messages laid out around their last field."""

from __future__ import annotations

import math

import pytest
import torch

from collectives.payloads.base import Dense, unpack
from collectives.payloads.codec.values import add_divided_, add_values, to_value_dtype, value_limit
from collectives.payloads.codes import Codes, TwoMeans


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_overflows_saturates_and_nan_stays(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    x = torch.tensor([math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 0.5])
    rounded = to_value_dtype(x, dtype)
    assert rounded[[0, 1, 3, 4, 5]].tolist() == [largest, -largest, largest, -largest, 0.5]
    assert rounded[2].isnan()


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 7, 16, 31, 100, 2047])
def test_a_sum_of_largest_values_never_overflows_fp16(world_size: int) -> None:
    x = to_value_dtype(torch.full((world_size,), 1e9), torch.float16, world_size)
    assert x[0] > 65504 / world_size - 32
    total = x[0]
    for term in x[1:]:
        total = total + term
    assert total <= 65504


def test_dividing_the_range_alone_would_overflow() -> None:
    """65504 / 3 rounds up to 21840, and the sum of three of them is infinite; the limit is a multiple of 32 instead."""
    naive = torch.tensor(65504 / 3).half()
    assert (naive + naive + naive).isinf()
    assert value_limit(torch.float16, 3) == 21824


def test_too_many_ranks_for_fp16_are_refused() -> None:
    with pytest.raises(ValueError, match="use bf16 or fp32"):
        to_value_dtype(torch.ones(1), torch.float16, 2048)


def test_fp32_passes_through() -> None:
    x = torch.tensor([1.0, math.inf])
    assert to_value_dtype(x, torch.float32, 7) is x


def test_sixteen_bit_values_add_in_fp32_and_round_once() -> None:
    a, b = torch.tensor([1.0, 65504.0, -65504.0]).half(), torch.tensor([2**-11, 65504.0, -1000.0]).half()
    assert add_values(a, b).tolist() == [1.0, 65504.0, -65504.0]
    assert add_values(a, torch.tensor([3 * 2**-11, 0, 0]).half()).tolist() == [1.0 + 2**-9, 65504.0, -65504.0]
    assert add_values(a, torch.ones(3).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("divisor", [1, 2, 3, 4, 7, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_adding_a_quotient(dtype: torch.dtype, divisor: float) -> None:
    values = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    dense = torch.linspace(-1, 1, 1000)
    expected = dense + values.float() / divisor
    add_divided_(dense, values, divisor)
    assert torch.equal(dense, expected)


CPU = torch.device("cpu")


def test_a_payload_with_room_packs_the_bytes_of_one_without_and_copies_nothing() -> None:
    scales = torch.tensor([0.5, 2.0, 3.0])
    codes = Codes.room_for_codes(20, 4, CPU, block_numel=8)
    bits, values = TwoMeans.room(3, torch.uint8, CPU), Dense.room(20, torch.half, CPU)
    for field in (codes, bits, values):
        field.copy_(torch.arange(field.numel()))
    for payload, field, copy in (
        (Codes(20, "levels", 4, codes, scales, 8), codes, Codes(20, "levels", 4, codes.clone(), scales, 8)),
        (TwoMeans(20, -1.0, 1.0, bits), bits, TwoMeans(20, -1.0, 1.0, bits.clone())),
        (Dense(values), values, Dense(values.clone())),
    ):
        packed = payload.pack()
        assert torch.equal(packed, copy.pack())
        assert packed.data_ptr() + packed.numel() == field.data_ptr() + field.numel() * field.element_size()
        assert torch.equal(unpack(packed).to_dense(), copy.to_dense())


def test_a_part_of_a_payload_with_room_is_copied() -> None:
    values = Dense.room(20, torch.float32, CPU).copy_(torch.arange(20))
    part = Dense(values).slice(10, 20)
    assert unpack(part.pack()).to_dense().tolist() == list(range(10, 20))
    assert values.tolist() == list(range(20))


def test_what_was_received_is_packed_into_memory_of_its_own() -> None:
    """The received buffer may belong to the sender, or be reused for another payload."""
    received = Dense(torch.arange(20)).pack()
    packed = unpack(received).pack()
    assert torch.equal(packed, received)
    assert packed.data_ptr() != received.data_ptr()
