"""Every kind, type and length is encoded and decoded; the interface of all kinds is compared with dense tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from collectives.payloads.base import HEADER_BYTES, PayloadError, balanced_borders, unpack
from collectives.payloads.codec import values
from collectives.payloads.sparse import IndexedValues
from tests.testing.payloads import DEVICES, FLOATS, LENGTHS, MAKERS, Example, cut, make

EVERY = pytest.mark.parametrize("name", MAKERS)


def exact(name: str) -> bool:
    """Return whether decoding only copies values, so that equality is exact (a Cholesky factor is multiplied out)."""
    return name != "cholesky"


def assert_stands_for(dense: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    if exact(name):
        assert torch.equal(dense, expected)
    else:
        torch.testing.assert_close(dense, expected, rtol=1e-5, atol=1e-5)


@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_round_trip(name: str, dtype: torch.dtype) -> None:
    for numel in LENGTHS:
        example = make(name, numel, dtype)
        packed = example.payload.pack()
        assert packed.numel() == example.payload.nbytes
        again = unpack(packed)
        assert again.numel == example.payload.numel == example.dense.numel()
        assert_stands_for(example.payload.to_dense(), example.dense, name)
        assert torch.equal(again.to_dense(), example.payload.to_dense())
        assert torch.equal(again.pack(), packed)


@EVERY
def test_tensors_longer_than_a_stretch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With cache_blocks of 24 elements, all payloads cross the borders of the blocks."""
    monkeypatch.setattr(values, "LENGTH", 24)
    example = make(name, 1025, torch.float16)
    again = unpack(example.payload.pack())
    assert_stands_for(again.to_dense(), example.dense, name)
    dense = torch.ones(example.dense.numel())
    again.add_to_(dense, divisor=3)
    assert_stands_for(dense, 1 + example.dense / 3, name)
    dense = torch.ones(example.dense.numel())
    again.subtract_from_(dense)
    assert_stands_for(dense, 1 - example.dense, name)


@EVERY
@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_a_buffer_may_lie_anywhere_and_be_longer_than_its_payload(name: str, offset: int) -> None:
    example = make(name, 1025, torch.float32)
    packed = example.payload.pack()
    buffer = torch.full((offset + packed.numel() + 33,), 0xA5, dtype=torch.uint8)
    buffer[offset : offset + packed.numel()] = packed
    assert_stands_for(unpack(buffer[offset:]).to_dense(), example.dense, name)


@EVERY
def test_every_shorter_buffer_is_refused(name: str) -> None:
    packed = make(name, 63, torch.float16).payload.pack()
    for length in range(packed.numel()):
        with pytest.raises(PayloadError):
            unpack(packed[:length].clone())


@EVERY
def test_the_tensor_id_travels(name: str) -> None:
    payload = make(name, 1025, torch.float32).payload
    payload.tensor_id = 513
    assert unpack(payload.pack()).tensor_id == 513


@EVERY
def test_add_to(name: str) -> None:
    for numel, divisor in itertools.product([0, 1, 9, 1025], [1, 3, 4]):
        example = make(name, numel, torch.float16)
        start = torch.randn(example.dense.numel(), generator=torch.Generator().manual_seed(5))
        dense = start.clone()
        example.payload.add_to_(dense, divisor=divisor)
        assert_stands_for(dense, start + example.dense / divisor, name)
        double = start.double()
        example.payload.add_to_(double, divisor=divisor)
        torch.testing.assert_close(double, start.double() + example.dense.double() / divisor, rtol=1e-5, atol=1e-5)


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_add_to_a_narrow_tensor_rounds_to_its_type(name: str, dtype: torch.dtype) -> None:
    example = make(name, 1025, torch.float32)
    dense = torch.ones(example.dense.numel(), dtype=dtype)
    example.payload.add_to_(dense, divisor=2)
    assert dense.dtype == dtype
    torch.testing.assert_close(dense.float(), 1 + example.dense / 2, rtol=0.02, atol=0.02)


@EVERY
@pytest.mark.parametrize("numel", [0, 1, 9, 1025])
def test_subtract_from_leaves_the_residual(name: str, numel: int) -> None:
    example = make(name, numel, torch.bfloat16)
    start = torch.randn(example.dense.numel(), generator=torch.Generator().manual_seed(6))
    dense = start.clone()
    example.payload.subtract_from_(dense)
    assert_stands_for(dense, start - example.dense, name)


@EVERY
@pytest.mark.parametrize("numel", [0, 1, 9, 1025])
def test_clear_in_zeroes_exactly_what_is_sent(name: str, numel: int) -> None:
    example = make(name, numel, torch.float32)
    dense = torch.ones(example.dense.numel())
    example.payload.clear_in_(dense)
    assert torch.equal(dense == 0, example.sent)


@EVERY
def test_parts_lie_end_to_end(name: str) -> None:
    for num_parts, numel in itertools.product([1, 2, 3, 7], [0, 1, 3, 63, 1025]):
        example = make(name, numel, torch.float32)
        parts = cut(example.payload, num_parts)
        assert len(parts) == num_parts
        assert sum(part.numel for part in parts) == example.payload.numel
        if not exact(name):
            continue
        assert torch.equal(torch.cat([unpack(part.pack()).to_dense() for part in parts]), example.dense)
        if name not in ("bundle", "triangle"):
            assert sum(part.num_entries for part in parts) == example.payload.num_entries == int(example.sent.sum())


@EVERY
def test_slice_refuses_other_borders(name: str) -> None:
    payload = make(name, 1025, torch.float32).payload
    for start, stop in ((-1, 5), (5, 4), (0, payload.numel + 1)):
        with pytest.raises(PayloadError, match="do not lie within"):
            payload.slice(start, stop)
    if payload.alignment > 1 and not payload.splits_blocks and name != "bundle":
        with pytest.raises(PayloadError, match="can be cut at multiples of"):
            payload.slice(0, 1)


@EVERY
@pytest.mark.parametrize("numel", [0, 1, 9, 1025])
def test_entries_are_counted_up_to_each_border(name: str, numel: int) -> None:
    example = make(name, numel, torch.float32)
    total = example.dense.numel()
    borders = sorted({0, total // 3, total // 2, min(total, total // 2 + 1), total})
    borders = [0, *borders]  # an empty interval
    if isinstance(example.payload, IndexedValues):
        assert example.payload.entries_before(borders) == [int(example.sent[:border].sum()) for border in borders]


@EVERY
@pytest.mark.parametrize("device", DEVICES)
def test_payloads_live_where_their_buffer_lies(name: str, device: str) -> None:
    example = make(name, 1025, torch.float16)
    again = unpack(example.payload.pack().to(device))
    assert again.device.type == device
    assert torch.equal(again.pack().cpu(), example.payload.pack())
    dense = torch.zeros(example.dense.numel(), device=device)
    again.add_to_(dense, divisor=3)
    torch.testing.assert_close(dense.cpu(), example.dense / 3, rtol=1e-5, atol=1e-5)
    again.clear_in_(dense)
    assert torch.equal((dense == 0).cpu() | (example.dense == 0), torch.ones_like(example.sent))


@EVERY
def test_elementwise_kinds_add_on_their_wire(name: str) -> None:
    a, b = (make(name, 64, torch.float32, seed) for seed in (0, 1))
    if not a.payload.elementwise:
        with pytest.raises(PayloadError, match="no element-wise wire tensor"):
            _ = a.payload.wire
        with pytest.raises(PayloadError, match="no element-wise wire tensor"):
            a.payload.with_wire(torch.zeros(0))
        return
    total = a.payload.with_wire(a.payload.wire + b.payload.wire)
    assert torch.equal(total.to_dense(), a.dense + b.dense)


FP32_SUMS = ("sparse_levels", "sparse_codes-sigma", "sparse_codes-int8")


@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_add_rounds_the_fp32_sum_once(name: str, dtype: torch.dtype) -> None:
    for numel in [0, 1, 9, 1023]:
        a, b = (make(name, numel, dtype, seed) for seed in (0, 1))
        if not a.payload.addable:
            with pytest.raises(PayloadError, match="cannot be added"):
                a.payload.add(b.payload)
            continue
        total = a.payload.add(b.payload)
        own = {"sparse_codes": torch.bfloat16} | dict.fromkeys(FP32_SUMS, torch.float32)
        expected = (a.dense + b.dense).to(own.get(name, dtype)).float()
        if exact(name):
            assert torch.equal(total.to_dense(), expected)
            assert torch.equal(unpack(total.pack()).to_dense(), expected)
            assert torch.equal(b.payload.add(a.payload).to_dense(), expected)
        else:
            size = int(numel**0.5)
            tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
            torch.testing.assert_close(total.to_dense(), a.dense + b.dense, rtol=tolerance, atol=tolerance * size)


@EVERY
def test_payloads_of_different_lengths_do_not_add(name: str) -> None:
    a, b = make(name, 9, torch.float32), make(name, 1024, torch.float32)
    with pytest.raises(PayloadError, match="cannot be added"):
        a.payload.add(b.payload)


MIXED = ("dense", "sparse", "sparse-1%", "group_sparse", "seeded")


def mixed(seed: int) -> list[Example]:
    return [make(name, 1000, torch.float16, seed) for name in MIXED]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(range(5), range(5))))
def test_kinds_that_widen_into_each_other_add(left: int, right: int) -> None:
    a, b = mixed(0)[left], mixed(1)[right]
    assert torch.equal(a.payload.add(b.payload).to_dense(), (a.dense + b.dense).half().float())


def test_header_of_another_format_is_refused() -> None:
    packed = make("dense", 9, torch.float32).payload.pack()
    for byte, value, message in (
        (0, 0, "magic"),
        (2, 200, "no payload kind"),
        (2, 0, "no payload kind"),
        (3, 99, "type"),
    ):
        damaged = packed.clone()
        damaged[byte] = value
        with pytest.raises(PayloadError, match=message):
            unpack(damaged)


def test_only_flat_bytes_can_be_unpacked() -> None:
    packed = make("dense", 9, torch.float32).payload.pack()
    for buffer in (packed.view(torch.int8), packed.view(2, -1), packed.repeat_interleave(2)[::2]):
        with pytest.raises(PayloadError, match="contiguous 1-D uint8"):
            unpack(buffer)
    with pytest.raises(PayloadError, match=f"needs {HEADER_BYTES} header bytes"):
        unpack(packed[:3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right"),
    [*itertools.product(MIXED, MIXED), ("row_sparse", "row_sparse"), ("row_sparse", "dense"), ("bundle", "bundle")],
)
def test_what_rounding_takes_off_a_sum_is_handed_over(left: str, right: str, dtype: torch.dtype) -> None:
    a, b = make(left, 1000, dtype, 0), make(right, 1000, dtype, 1)
    lost = torch.zeros(a.payload.numel)

    def keep(start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        where = torch.arange(len(values)) if positions is None else positions
        lost.index_add_(0, start + where, values)

    total = a.payload.add(b.payload, keep).to_dense()
    assert left != "dense" or lost.any()
    assert torch.equal(total, a.payload.add(b.payload).to_dense())
    assert torch.equal(total + lost, a.dense + b.dense)


def test_balanced_borders() -> None:
    assert balanced_borders(10, 3) == [0, 4, 7, 10]
    assert balanced_borders(10, 3, 4) == [0, 4, 8, 10]
    assert balanced_borders(3, 5) == [0, 1, 2, 3, 3, 3]
    assert balanced_borders(0, 2, 8) == [0, 0, 0]
