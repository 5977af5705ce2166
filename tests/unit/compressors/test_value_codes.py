"""Values as codes of 2 or 8 bits: errors, contraction, hard inputs, and native loops against the reference."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from collectives.kernels.library import serving
from collectives.options import OptionError, build
from collectives.payloads import SparseCodes, unpack
from collectives.payloads.codec.value_codes import VALUE_CODINGS, ValueCoding, block_length, decode_values
from compressors.base import Compressor
from compressors.group_topk import GroupTopK
from compressors.kernels.value_codes import Coded, code_values
from compressors.parts.values import CodeForm
from compressors.topk import TopK
from tests.testing.compressor_cases import layers_of_shapes, step_at
from tests.testing.loops import assert_gives_what_the_reference_gives, needs_loops, same

CHUNK, NUM_CHUNKS, KEPT = 4096, 64, 64
LARGEST_BF16 = torch.finfo(torch.bfloat16).max
each_coding = pytest.mark.parametrize("coding", VALUE_CODINGS)


def distributions() -> dict[str, torch.Tensor]:
    """Return fp32 [NUM_CHUNKS, CHUNK] by name."""
    random = np.random.default_rng(4)
    shape = NUM_CHUNKS, CHUNK
    one_hot = np.zeros(shape)
    one_hot[:, 77] = -3.0
    drawn = {
        "normal": random.normal(size=shape),
        "laplace": random.laplace(size=shape),
        "t3": random.standard_t(3, size=shape),
        "scales": random.normal(size=shape) * random.lognormal(size=(NUM_CHUNKS, 1)),
        "one-hot": one_hot,
        "constant": np.full(shape, 0.25),
    }
    return {name: torch.from_numpy(x).float() for name, x in drawn.items()}


DRAWN = distributions()


def sent(x: torch.Tensor, values: str, **options: object) -> SparseCodes:
    compressor = GroupTopK(group_size=CHUNK, ratio=KEPT / CHUNK, values=values, **options)  # type: ignore[arg-type]
    payload = compressor.encode(x.view(-1), layers_of_shapes((x.numel(),))[0], step_at(0))
    assert isinstance(payload, SparseCodes)
    return payload


def lost(x: torch.Tensor, values: str) -> float:
    """Return the squared error of the values sent, relative to their squares."""
    payload = sent(x, values)
    kept = x.view(-1)[payload.positions]
    return float((kept - payload.values).square().sum() / kept.square().sum())


@pytest.mark.parametrize("name", ["normal", "laplace", "t3", "scales"])
def test_two_magnitudes_lose_at_most_two_fifths_of_sigma(name: str) -> None:
    assert lost(DRAWN[name], "two_magnitudes") <= 0.4 * lost(DRAWN[name], "sigma")


def test_sigma_does_not_beat_one_bit_per_value_on_heavy_tails() -> None:
    """Four levels by one standard deviation of all values, against sign times the mean magnitude of a chunk."""
    x = DRAWN["t3"]
    kept = x.view(-1)[sent(x, "sigma").positions].view(NUM_CHUNKS, KEPT)
    signs = kept.sign() * kept.abs().mean(1, keepdim=True)
    by_sign = float((kept - signs).square().sum() / kept.square().sum())
    assert lost(x, "sigma") > by_sign > 3 * lost(x, "two_magnitudes")


@each_coding
def test_hard_values(coding: ValueCoding) -> None:
    signs = torch.where(torch.arange(1000) % 3 == 0, -1.0, 1.0)
    assert torch.equal(code_values(0.25 * signs, coding, block_length(coding, 1000, 10**5)).arrived, 0.25 * signs)
    arrived = code_values(torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38]), coding, 40).arrived
    assert arrived.isfinite().all()
    assert torch.equal(arrived.sign(), torch.tensor([1.0, -1.0, 1.0, 1.0]))
    assert (arrived.abs() >= 0.99 * LARGEST_BF16).all()
    arrived = code_values(torch.tensor([-0.0, 0.0, 1.0, -1e-45, -1e-30]), coding, 40).arrived
    assert not arrived[arrived == 0].signbit().any()
    payload = sent(torch.zeros(2 * CHUNK), coding)
    assert (payload.num_entries, payload.nbytes, payload.pack().numel()) == (0, 24, 24)
    assert not unpack(payload.pack()).to_dense().any()


def test_of_two_magnitudes_both_arrive_wherever_they_lie() -> None:
    for large in itertools.chain(range(1, 8), [20, 39, 40]):
        values = torch.full((40,), -0.5)
        values[:large] = 3.0
        assert torch.equal(code_values(values, "two_magnitudes", 40).arrived, values)


@each_coding
@pytest.mark.parametrize("count", [1, 2, 3, 5, 41])
def test_few_values(count: int, coding: ValueCoding) -> None:
    values = torch.linspace(-2, 3, count) if count > 1 else torch.tensor([-1.5])
    arrived = code_values(values, coding, 40).arrived
    most = 1.0 if (coding, count) == ("sigma", 2) else 0.3  # two values always lie in one level of sigma
    assert float((values - arrived).square().sum()) < most * float(values.square().sum())


@each_coding
@pytest.mark.parametrize("numel", [1, 7, 1024, 1025, 5000])
@pytest.mark.parametrize(("group_size", "ratio"), [(1024, 0.01), (1024, 1e-6), (100, 0.07), (1, 1.0), (4096, 1 / 64)])
def test_positions_and_bytes_survive(numel: int, group_size: int, ratio: float, coding: ValueCoding) -> None:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) ** 3
    (layer,) = layers_of_shapes((numel,))
    options = {"ratio": ratio, "values": coding, "warmup_epochs": 0}
    floats = GroupTopK(ratio=ratio, group_size=group_size, values="floats").encode(x, layer, step_at(0))
    for compressor in (GroupTopK(group_size=group_size, **options), TopK(**options)):  # type: ignore[arg-type]
        payload = compressor.encode(x, layer, step_at(0))
        message = payload.pack()
        again = unpack(message)
        assert isinstance(payload, SparseCodes)
        assert isinstance(again, SparseCodes)
        assert torch.equal(again.positions, payload.positions)
        assert same(again.values, payload.values)
        assert message.numel() == payload.nbytes == compressor.expected_nbytes(layer)
        if isinstance(compressor, GroupTopK):
            assert torch.equal(again.positions, floats.positions)  # type: ignore[attr-defined]


def test_codes_have_no_value_dtype() -> None:
    with pytest.raises(OptionError, match="value_dtype=bf16 has no use; leave value_dtype out, or use values"):
        build("compressors", Compressor, "topk:values=int8,value_dtype=bf16")
    assert TopK(values="int8", value_dtype="fp16").form == CodeForm("int8")


def coded(x: torch.Tensor, seed: int) -> list[torch.Tensor]:
    coding, numel = VALUE_CODINGS[seed % 3], len(x) * [1, 7, 100][seed // 3 % 3]
    block = block_length(coding, len(x), numel)
    tables, packed, arrived = code_values(x.contiguous(), coding, block)
    left, positions = torch.linspace(-1, 1, numel), torch.arange(len(x)) * (numel // max(1, len(x)))
    again = code_values(x.contiguous(), coding, block, (positions, left))
    assert all(map(same, again, (tables, packed, arrived)))
    return [tables, packed, arrived, left, decode_values(coding, tables, packed, len(x), block)]


@pytest.mark.loops
@needs_loops[1]
def test_loops_give_what_the_reference_gives(cases: range) -> None:
    assert_gives_what_the_reference_gives(coded, cases)


@needs_loops[1]
@settings(max_examples=100, deadline=None)
@given(
    arrays.arrays(np.float32, st.integers(1, 200), elements=st.floats(width=32)),
    st.sampled_from(VALUE_CODINGS),
    st.sampled_from([32, 40, 64, 4096]),
)
def test_any_values_give_the_same_codes(values: np.ndarray, coding: ValueCoding, block: int) -> None:
    x = torch.from_numpy(values)
    block = len(x) if coding == "sigma" else block
    native = code_values(x, coding, block)
    with serving("reference"):
        assert all(map(same, native, code_values(x, coding, block)))
    assert isinstance(native, Coded)
    assert same(native.arrived, decode_values(coding, native.tables, native.packed, len(x), block))
    assert native.arrived.isfinite().all()
