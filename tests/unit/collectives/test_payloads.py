"""Every kind of payload x every property: it travels, acts on a tensor, is cut and added, and damage is noticed."""

from __future__ import annotations

import functools
import itertools
import random
import resource
import struct
from typing import Literal

import pytest
import torch

from collectives.payloads import (
    Bundle,
    CholeskyFactor,
    Dense,
    GroupSparse,
    RowSparse,
    Seeded,
    Sparse,
    SparseCodes,
    SparseLevels,
    Triangle,
    TwoMeans,
)
from collectives.payloads.base import HEADER_BYTES, Payload, PayloadError, balanced_borders, unpack
from collectives.payloads.codec import values
from collectives.payloads.codec.index_sets import bitmap_of
from collectives.payloads.codec.value_codes import ValueCoding
from collectives.payloads.sparse import IndexedValues
from tests.testing.payloads import (
    DEVICES,
    FLOATS,
    LENGTHS,
    MAKERS,
    cut,
    group_sparse_example,
    make,
    packed_codes,
    sparse_codes_example,
    sparse_example,
)

EVERY = pytest.mark.parametrize("name", MAKERS)
HALF, SINGLE = torch.float16, torch.float32


def assert_stands_for(dense: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    """Compare bit for bit, except for a Cholesky factor, which is multiplied out."""
    tolerance = 1e-5 if name == "cholesky" else 0
    torch.testing.assert_close(dense, expected, rtol=tolerance, atol=tolerance)


@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_it_travels(name: str, dtype: torch.dtype) -> None:
    """The buffer that is decoded may lie anywhere and be longer than its payload."""
    for numel in LENGTHS:
        example = make(name, numel, dtype)
        example.payload.tensor_id = 513
        packed = example.payload.pack()
        assert packed.numel() == example.payload.nbytes
        assert_stands_for(example.payload.to_dense(), example.dense, name)
        for offset in (0, 1, 2, 4, 8):
            buffer = torch.full((offset + packed.numel() + 33,), 0xA5, dtype=torch.uint8)
            buffer[offset : offset + packed.numel()] = packed
            again = unpack(buffer[offset:])
            assert (again.numel, again.tensor_id) == (example.dense.numel(), 513)
            assert torch.equal(again.to_dense(), example.payload.to_dense())
            assert torch.equal(again.pack(), packed)


@EVERY
@pytest.mark.parametrize("stretch", [24, values.LENGTH])
def test_it_is_added_subtracted_and_cleared(name: str, stretch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stretches of 24 elements, all payloads cross the borders of the blocks that fit into the cache."""
    monkeypatch.setattr(values, "LENGTH", stretch)
    for numel, dtype in itertools.product([0, 1, 9, 1025], FLOATS):
        example = make(name, numel, dtype)
        payload, total = unpack(example.payload.pack()), example.dense.numel()
        start = torch.randn(total, generator=torch.Generator().manual_seed(5))
        for divisor in (1, 3, 4):
            dense, double = start.clone(), start.double()
            payload.add_to_(dense, divisor=divisor)
            assert_stands_for(dense, start + example.dense / divisor, name)
            payload.add_to_(double, divisor=divisor)
            torch.testing.assert_close(double, start.double() + example.dense.double() / divisor, rtol=1e-5, atol=1e-5)
        for narrow in (torch.float16, torch.bfloat16):
            dense = torch.ones(total, dtype=narrow)
            payload.add_to_(dense, divisor=2)
            assert dense.dtype == narrow
            torch.testing.assert_close(dense.float(), 1 + example.dense / 2, rtol=0.02, atol=0.02)
        dense = start.clone()
        payload.subtract_from_(dense)
        assert_stands_for(dense, start - example.dense, name)
        dense = torch.ones(total)
        payload.clear_in_(dense)
        assert torch.equal(dense == 0, example.sent)


@EVERY
@pytest.mark.parametrize("device", DEVICES)
def test_it_lives_where_its_buffer_lies(name: str, device: str) -> None:
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
def test_its_parts_lie_end_to_end(name: str) -> None:
    for num_parts, numel in itertools.product([1, 2, 3, 7], [0, 1, 3, 63, 1025]):
        example = make(name, numel, torch.float32)
        parts = cut(example.payload, num_parts)
        assert len(parts) == num_parts
        assert sum(part.numel for part in parts) == example.payload.numel
        if name == "cholesky":
            continue
        assert torch.equal(torch.cat([unpack(part.pack()).to_dense() for part in parts]), example.dense)
        if name not in ("bundle", "triangle"):
            assert sum(part.num_entries for part in parts) == example.payload.num_entries == int(example.sent.sum())
        if isinstance(example.payload, IndexedValues):
            borders = [0, 0, *sorted({numel // 3, numel // 2, min(numel, numel // 2 + 1), numel})]
            assert example.payload.entries_before(borders) == [int(example.sent[:border].sum()) for border in borders]


@EVERY
def test_other_borders_are_refused(name: str) -> None:
    payload = make(name, 1025, torch.float32).payload
    for start, stop in ((-1, 5), (5, 4), (0, payload.numel + 1)):
        with pytest.raises(PayloadError, match="do not lie within"):
            payload.slice(start, stop)
    if payload.alignment > 1 and not payload.splits_blocks and name != "bundle":
        with pytest.raises(PayloadError, match="can be cut at multiples of"):
            payload.slice(0, 1)


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


DTYPE_OF_SUMS = {"sparse_codes": torch.bfloat16} | dict.fromkeys(
    ("sparse_levels", "sparse_codes-sigma", "sparse_codes-int8"), torch.float32
)


@EVERY
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_add_rounds_the_fp32_sum_once(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(PayloadError, match="cannot be added"):
        make(name, 9, dtype).payload.add(make(name, 1024, dtype).payload)
    for numel in [0, 1, 9, 1023]:
        a, b = (make(name, numel, dtype, seed) for seed in (0, 1))
        if not a.payload.addable:
            with pytest.raises(PayloadError, match="cannot be added"):
                a.payload.add(b.payload)
            continue
        total = a.payload.add(b.payload)
        if name == "cholesky":
            tolerance = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
            atol = tolerance * int(numel**0.5)
            torch.testing.assert_close(total.to_dense(), a.dense + b.dense, rtol=tolerance, atol=atol)
            continue
        expected = (a.dense + b.dense).to(DTYPE_OF_SUMS.get(name, dtype)).float()
        assert torch.equal(total.to_dense(), expected)
        assert torch.equal(unpack(total.pack()).to_dense(), expected)
        assert torch.equal(b.payload.add(a.payload).to_dense(), expected)


MIXED = ("dense", "sparse", "sparse-1%", "group_sparse", "seeded")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("left", "right"),
    [*itertools.product(MIXED, MIXED), ("row_sparse", "row_sparse"), ("row_sparse", "dense"), ("bundle", "bundle")],
)
def test_kinds_add_to_each_other_and_hand_over_what_rounding_takes_off(
    left: str, right: str, dtype: torch.dtype
) -> None:
    a, b = make(left, 1000, dtype, 0), make(right, 1000, dtype, 1)
    lost = torch.zeros(a.payload.numel)

    def keep(start: int, values: torch.Tensor, positions: torch.Tensor | None = None) -> None:
        where = torch.arange(len(values)) if positions is None else positions
        lost.index_add_(0, start + where, values)

    total = a.payload.add(b.payload, keep).to_dense()
    assert left != "dense" or lost.any()
    assert torch.equal(total, (a.dense + b.dense).to(dtype).float())
    assert torch.equal(total, a.payload.add(b.payload).to_dense())
    assert torch.equal(total + lost, a.dense + b.dense)


def test_balanced_borders() -> None:
    assert balanced_borders(10, 3) == [0, 4, 7, 10]
    assert balanced_borders(10, 3, 4) == [0, 4, 8, 10]
    assert balanced_borders(3, 5) == [0, 1, 2, 3, 3, 3]
    assert balanced_borders(0, 2, 8) == [0, 0, 0]


GOLDEN: dict[str, tuple[Payload, str]] = {
    "dense": (Dense(torch.tensor([1.0, -2.0], dtype=HALF)), "5747 01 01 0000 0000 02000000 02000000  003c 00c0"),
    "sparse coo": (
        Sparse(200, torch.tensor([3]), torch.tensor([1.0])),
        "5747 02 00 0000 0000 c8000000 01000000  0000803f 03",
    ),
    "sparse bitmap": (
        Sparse(9, torch.tensor([0, 3, 8]), torch.tensor([1.0, 1.0, 2.0], dtype=HALF)),
        "5747 02 01 0100 0000 09000000 03000000  003c 003c 0040 0901",
    ),
    "sparse elias-fano": (
        Sparse(1000, torch.tensor([1, 600, 999]), torch.tensor([1.0, 1.0, 1.0], dtype=HALF)),
        # low 8 bits 1, 88, 231; high parts 0, 2, 3 -> ones at bits 0, 3, 5
        "5747 02 01 0200 0000 e8030000 03000000  003c 003c 003c 0158e7 29",
    ),
    "sparse of zeros": (Sparse(9, torch.tensor([0, 3]), torch.zeros(2)), "5747 02 00 0000 0000 09000000 00000000"),
    "sparse levels": (
        SparseLevels(1000, torch.tensor([1, 600, 999]), 0.5, 2.0, torch.tensor([0xF0, 2], dtype=torch.uint8)),
        # indices as above; 0.5, -64, 2
        "5747 0b 00 0200 0000 e8030000 03000000  0000003f 00000040  0158e7 29 f002",
    ),
    "sparse codes, two magnitudes at local indices": (
        SparseCodes(
            20,
            16,
            2,
            torch.tensor([1, 15, 18]),
            "two_magnitudes",
            torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
            torch.tensor([0b00_11_10], dtype=torch.uint8),
        ),
        # values 2, -2, 1; 4-bit indices 1, 15, 2
        "5747 0c 02 0000 0000 14000000 03000000  10000000 02000000  803f 0040 0e  f102",
    ),
    "sparse codes, sigma at local indices": (
        SparseCodes(
            9,
            9,
            3,
            torch.tensor([0, 3, 8]),
            "sigma",
            torch.tensor([-1.0, 0.0, 0.5, 2.0]),
            torch.tensor([0b10_11_00], dtype=torch.uint8),
        ),
        # values -1, 2, 0.5; 4-bit indices 0, 3, 8
        "5747 0c 00 0300 0000 09000000 03000000  09000000 03000000  000080bf 00000000 0000003f 00000040 2c  3008",
    ),
    "sparse codes, int8 by gaps": (
        SparseCodes(
            1000,
            1000,
            8,
            torch.tensor([1, 65, 130, 300, 600, 700, 900, 999]),
            "int8",
            torch.tensor([0.5]),
            torch.tensor([1, 255, 2, 129, 1, 1, 1, 1], dtype=torch.uint8),
        ),
        # values 0.5, -0.5, 1, -63.5, 0.5, ..; low 6 bits 1, 1, 2, 44, 24, 60, 4, 39; high parts 0, 1, 2, 4, 9, 10, 14,
        # 15 -> ones at bits 0, 2, 4, 7, 13, 15, 20, 22
        "5747 0c 00 0800 0000 e8030000 08000000  e8030000 08000000  0000003f 01ff028101010101 4120b0184f9c 95a050",
    ),
    "group sparse": (
        GroupSparse(20, 16, 2, torch.tensor([1.0, 2.0, 1.0], dtype=HALF), torch.tensor([1, 15, 2])),
        # 4-bit indices 1, 15, 2
        "5747 03 01 0000 0000 14000000 03000000  10000000 02000000  003c 0040 003c  f102",
    ),
    "row sparse": (
        RowSparse(6, torch.tensor([2]), torch.tensor([[1.0, 2.0]], dtype=HALF)),
        "5747 04 01 0000 0000 06000000 02000000  02000000 00000000  003c 0040 02",
    ),
    "seeded": (
        Seeded(100, 2**63 + 5, torch.tensor([1.0], dtype=HALF)),
        "5747 05 01 0000 0000 64000000 01000000  0500000000000080  003c",
    ),
    "codes as MXNet lays them out": (
        packed_codes(torch.tensor([3, 2, 0, 3]), codebook="ternary", bits=2, scales=torch.tensor([0.5])),
        "5747 06 00 0000 0000 04000000 04000000  00000000 02 01 0000  0000003f e3",
    ),
    "triangle": (
        Triangle(2, torch.tensor([1.0, 2.0, 1.0], dtype=HALF)),
        "5747 07 01 0000 0000 04000000 03000000  003c 0040 003c",
    ),
    "cholesky factor": (
        CholeskyFactor(2, torch.tensor([1.0, 2.0, 1.0], dtype=HALF), damping=0.5),
        "5747 08 01 0000 0000 04000000 03000000  0000003f 00000000  003c 0040 003c",
    ),
    "two means": (
        TwoMeans(5, -0.5, 1.0, torch.tensor([0b11001], dtype=torch.uint8)),
        "5747 0a 00 0000 0000 05000000 05000000  000000bf 0000803f  19",
    ),
    "bundle": (
        Bundle([Dense(torch.tensor([1.0], dtype=HALF)), Dense(torch.tensor([7], dtype=torch.int8))]),
        "5747 09 00 0000 0000 02000000 02000000  02000000 03000000 06000000 00000000"
        "5747 01 01 0000 0000 01000000 01000000  003c 000000000000"
        "5747 01 04 0000 0000 01000000 01000000  07 00000000000000",
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_vectors(name: str) -> None:
    payload, expected = GOLDEN[name]
    raw = bytes.fromhex(expected.replace(" ", ""))
    assert bytes(payload.pack().tolist()).hex() == raw.hex()
    assert torch.equal(unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8)).to_dense(), payload.to_dense())


def sparse(numel: int, count: int, dtype: torch.dtype = SINGLE) -> Sparse:
    return Sparse(numel, torch.arange(count) * (numel // count), torch.ones(count, dtype=dtype))


def groups(numel: int, group_size: int, k: int) -> Payload:
    return group_sparse_example(numel, SINGLE, torch.Generator().manual_seed(0), group_size, k).payload


def codes_at(numel: int, group_size: int, k: int, coding: ValueCoding) -> Payload:
    generator = torch.Generator().manual_seed(0)
    return sparse_codes_example(numel, SINGLE, generator, coding, group_size, k).payload


def levels(bits: int, num_blocks: int, dtype: torch.dtype) -> Payload:
    book, scales = "sign" if bits == 1 else "levels", torch.ones(num_blocks, dtype=dtype)
    block_numel = 100 if num_blocks > 1 else 0
    return packed_codes(torch.zeros(1001), codebook=book, bits=bits, scales=scales, block_numel=block_numel)


SIZES: list[tuple[Payload, int]] = [
    (Dense(torch.zeros(1000)), 16 + 4000),
    (Dense(torch.zeros(1000, dtype=torch.int8)), 16 + 1000),
    (sparse(100_000, 10), 16 + 40 + (17 + 3)),  # 13 low bits: 130 bits; unary 10 + 12 bits
    (sparse(1_000_000, 10_000), 16 + 40_000 + (7_500 + 3_203)),  # 6 low bits; unary 10 000 + 15 624 bits
    (sparse(1_000_000, 10_000, HALF), 16 + 20_000 + 10_703),
    (sparse(256, 2), 16 + 8 + 2),  # one byte each: Elias-Fano needs 14 + 3 bits
    (sparse(1_000_000, 400_000), 16 + 1_600_000 + 125_000),  # bitmap
    (sparse(1000, 990), 16 + 4000),  # dense: a bitmap needs 3960 + 125
    (sparse(1000, 968), 16 + 3872 + 125),  # the last count below 31/32
    (sparse(1000, 969), 16 + 4000),
    (groups(1024, 256, 3), 24 + 12 * 4 + 12),  # one byte per index
    (groups(1025, 256, 3), 24 + 13 * 4 + 13),  # a last group of one
    (groups(1000, 257, 1), 24 + 4 * 4 + 5),  # nine bits
    (groups(100, 1000, 1), 24 + 4 + 1),  # a single short group: seven bits
    (groups(64, 1, 1), 24 + 64 * 4),  # groups of one need no index
    (groups(64, 8, 4), 24 + 32 * 4 + 8),  # bitmap of 8 bytes instead of 12 of indices
    # With 1 % of the entries, 2 bits of value, 0.8 of magnitudes and 8.6 of position: 0.44 of 16 and 10 bits.
    (codes_at(1 << 20, 1024, 10, "two_magnitudes"), 24 + 256 * 4 + 2560 + (7680 + 26_623 // 8 + 1)),
    (codes_at(1 << 20, 4096, 64, "two_magnitudes"), 24 + 256 * (4 + 16) + (12_288 + 32_767 // 8 + 1)),
    (codes_at(1 << 20, 1024, 1, "two_magnitudes"), 24 + 32 * 4 + 256 + 1280),  # 32 values share magnitudes
    (codes_at(1 << 20, 1024, 10, "sigma"), 24 + 16 + 2560 + (7680 + 26_623 // 8 + 1)),
    (codes_at(1 << 20, 1024, 10, "int8"), 24 + 256 * 4 + 10_240 + (7680 + 26_623 // 8 + 1)),
    (codes_at(64, 8, 4, "two_magnitudes"), 24 + 4 + 8 + 8),  # a bitmap
    (codes_at(1, 1024, 1, "two_magnitudes"), 24 + 4 + 1),
    (RowSparse(64 * 9, torch.arange(40), torch.ones(40, 9, dtype=HALF)), 24 + 40 * 18 + 8),  # a bitmap
    (RowSparse(64 * 9, torch.arange(2), torch.ones(2, 9, dtype=HALF)), 24 + 36 + 2),  # one byte each
    (Seeded(1000, 1, torch.ones(10, dtype=HALF)), 24 + 20),
    (levels(1, 1, SINGLE), 24 + 4 + 126),
    (levels(2, 1, HALF), 24 + 2 + 251),
    (levels(4, 11, HALF), 24 + 11 * 2 + 501),
    (levels(8, 11, SINGLE), 24 + 11 * 4 + 1001),
    (Triangle.from_matrix(torch.eye(256)), 16 + 4 * 256 * 257 // 2),
    (CholeskyFactor.from_factor(torch.eye(256, dtype=HALF)), 24 + 2 * 256 * 257 // 2),
    # Table of three members: 16 bytes; members of 17, 20 and 56 bytes take 24, 24 and 56.
    (Bundle([Dense(torch.ones(1, dtype=torch.int8)), Dense(torch.ones(1)), Dense(torch.ones(10))]), 32 + 24 + 24 + 56),
    # Zeros are sent as a header, unless other entries of the payload are not zero.
    (Sparse(100, torch.arange(4), torch.zeros(4)), 16),
    (GroupSparse(20, 10, 2, torch.zeros(4), torch.tensor([0, 1, 0, 1])), 24),
    (RowSparse(20, torch.tensor([0, 1]), torch.zeros(2, 2)), 24),
    (packed_codes(torch.tensor([0, 1, 0, 1]), codebook="sign", bits=1, scales=torch.zeros(1)), 24),
]


@pytest.mark.parametrize(("payload", "nbytes"), SIZES, ids=lambda value: type(value).__name__)
def test_bytes_on_the_wire(payload: Payload, nbytes: int) -> None:
    assert payload.nbytes == payload.pack().numel() == nbytes


def test_group_sparse_at_full_size() -> None:
    """11 173 962 elements, groups of 1024, k = 10 of fp16: 32.5 bytes per group, one entry in the short last group."""
    numel, full_groups = 11_173_962, 10_912
    indices = torch.cat([torch.arange(10).repeat(full_groups) * 100, torch.tensor([73])])
    payload = GroupSparse(numel, 1024, 10, torch.ones(indices.numel(), dtype=HALF), indices)
    assert payload.nbytes == payload.pack().numel() == 16 + 8 + full_groups * 325 // 10 + 2 + 2
    assert 1_063_900 < 3 * payload.nbytes < 1_064_100


def test_a_sparse_payload_never_exceeds_the_dense_one() -> None:
    for count, dtype in itertools.product(range(1, 101), (SINGLE, HALF)):
        payload = sparse_example(100, dtype, torch.Generator().manual_seed(0), density=count / 100).payload
        assert payload.nbytes <= 16 + 100 * dtype.itemsize


def test_indices_of_12_bits() -> None:
    """Pairs (i, j) take three bytes: i & 255; (i >> 8) | ((j & 15) << 4); j >> 4."""
    i, j, shared = 0xABC, 0xDEF, torch.ones(2, dtype=torch.bfloat16)
    codes = SparseCodes(
        8192, 4096, 1, torch.tensor([i, 4096 + j]), "two_magnitudes", shared, torch.zeros(1, dtype=torch.uint8)
    )
    assert codes.pack()[-3:].tolist() == [i & 255, (i >> 8) | ((j & 15) << 4), j >> 4]


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
    for buffer in (packed.view(torch.int8), packed.view(2, -1), packed.repeat_interleave(2)[::2]):
        with pytest.raises(PayloadError, match="contiguous 1-D uint8"):
            unpack(buffer)
    with pytest.raises(PayloadError, match=f"needs {HEADER_BYTES} header bytes"):
        unpack(packed[:3])


@EVERY
def test_every_shorter_buffer_is_refused(name: str) -> None:
    packed = make(name, 63, torch.float16).payload.pack()
    for length in range(packed.numel()):
        with pytest.raises(PayloadError):
            unpack(packed[:length].clone())


TELLING = (*range(13), 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
HEADER_FIELDS = (("<H", 0), ("<B", 2), ("<B", 3), ("<H", 4), ("<H", 6), ("<I", 8), ("<I", 12))
FIXED_FIELDS = tuple(("<I", HEADER_BYTES + offset) for offset in range(0, 24, 4))


@functools.cache
def corpus() -> list[bytes]:
    """Return packed payloads of every kind and type at a few lengths."""
    payloads = [make(name, numel, dtype).payload for name in MAKERS for dtype in FLOATS for numel in (0, 1, 9, 64, 100)]
    return [bytes(payload.pack().tolist()) for payload in payloads]


def truncate(raw: bytearray, rng: random.Random) -> bytearray:
    return raw[: rng.randrange(len(raw))]


def flip_bits(raw: bytearray, rng: random.Random) -> bytearray:
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return raw


def overwrite_field(raw: bytearray, rng: random.Random) -> bytearray:
    layout, offset = rng.choice(HEADER_FIELDS + FIXED_FIELDS)
    size = struct.calcsize(layout)
    if offset + size <= len(raw):
        struct.pack_into(layout, raw, offset, rng.choice(TELLING) % 2 ** (8 * size))
    return raw


def append_garbage(raw: bytearray, rng: random.Random) -> bytearray:
    return flip_bits(raw, rng) + rng.randbytes(rng.randint(1, 64))


def randomise_body(raw: bytearray, rng: random.Random) -> bytearray:
    return raw[:HEADER_BYTES] + rng.randbytes(rng.randint(0, 200))


MUTATIONS = (truncate, flip_bits, overwrite_field, overwrite_field, append_garbage, randomise_body)


def mutated(rng: random.Random) -> bytearray:
    """Return a packed payload of some kind with one or two random changes."""
    raw = bytearray(rng.choice(corpus()))
    for mutation in rng.choices(MUTATIONS, k=rng.choice((1, 1, 2))):
        raw = mutation(raw or bytearray(1), rng)
    return raw


def outcome_of(raw: bytearray) -> Literal["decoded", "refused"]:
    """Decode and, unless that is refused, use the payload in every way; any other error is raised."""
    try:
        payload = unpack(torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8))
    except PayloadError:
        return "refused"
    assert_valid(payload)
    return "decoded"


def assert_valid(payload: Payload) -> None:
    """Use the payload in every way that its length allows."""
    assert payload.num_entries <= payload.numel
    packed = payload.pack()
    assert packed.numel() == payload.nbytes
    if payload.numel > 100_000:
        return
    dense = payload.to_dense()
    assert dense.shape == (payload.numel,)
    torch.testing.assert_close(unpack(packed).to_dense(), dense, rtol=0, atol=0, equal_nan=True)
    payload.clear_in_(dense)
    if isinstance(payload, IndexedValues):
        assert payload.entries_before([0, payload.numel]) == [0, payload.num_entries]
    assert sum(part.numel for part in cut(payload, 2)) == payload.numel


@pytest.mark.loops
@pytest.mark.parametrize("batch", range(10))
def test_every_mutation_decodes_validly_or_raises_the_one_error(batch: int, cases: range) -> None:
    rng = random.Random(batch)
    outcomes = [outcome_of(mutated(rng)) for _ in range(10 * len(cases))]
    share = outcomes.count("decoded") / len(outcomes)
    assert 0.05 < share < 0.8, "the mutations should reach behind the checks"


DAMAGE = {
    "dense with fewer entries than elements": ("dense", "<I", 12, 63),
    "dense with flags": ("dense", "<H", 4, 1),
    "sparse in an unknown coding": ("sparse", "<H", 4, 3),
    "levels in an unknown coding": ("sparse_levels", "<H", 4, 3),
    "levels of another type": ("sparse_levels", "<B", 3, 1),
    "levels from below zero": ("sparse_levels", "<f", 16, -1.0),
    "levels from nothing": ("sparse_levels", "<f", 16, 0.0),
    "levels that fall": ("sparse_levels", "<f", 20, 0.5),
    "levels that are no numbers": ("sparse_levels", "<f", 20, float("nan")),
    "group sparse in an unknown coding": ("group_sparse", "<H", 4, 2),
    "codes at positions in an unknown coding": ("sparse_codes", "<H", 4, 9),
    "codes of sigma with magnitudes in bf16": ("sparse_codes", "<H", 4, 3),
    "codes in groups of no elements": ("sparse_codes", "<I", 16, 0),
    "groups of no elements": ("group_sparse", "<I", 16, 0),
    "more entries per group than elements": ("group_sparse", "<I", 20, 65),
    "rows of no elements": ("row_sparse", "<I", 16, 0),
    "rows that do not fill the matrix": ("row_sparse", "<I", 16, 7),
    "reserved bytes of rows": ("row_sparse", "<I", 20, 1),
    "seeded with flags": ("seeded", "<H", 4, 1),
    "codes of a width that the codebook lacks": ("codes-levels", "<B", 20, 1),
    "codes of no codebook": ("codes-levels", "<B", 21, 250),
    "reserved bytes of codes": ("codes-levels", "<H", 22, 1),
    "codes for some elements only": ("codes-levels", "<I", 12, 63),
    "scales in fp64": ("codes-levels", "<B", 3, 3),
    "a triangle of no square matrix": ("triangle", "<I", 8, 65),
    "a triangle of another size": ("triangle", "<I", 8, 81),
    "triangle with flags": ("triangle", "<H", 4, 1),
    "a factor of no square matrix": ("cholesky", "<I", 8, 65),
    "reserved bytes of a factor": ("cholesky", "<I", 20, 1),
    "a bundle of no members": ("bundle", "<I", 16, 0),
    "a bundle of another length": ("bundle", "<I", 8, 196),
    "a bundle with flags": ("bundle", "<H", 4, 1),
    "members that overlap": ("bundle", "<I", 24, 1),
    "members in no space": ("bundle", "<I", 20, 0),
    "integers in a sparse payload": ("sparse", "<B", 3, 4),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_one_field_is_noticed(name: str) -> None:
    kind, layout, offset, value = DAMAGE[name]
    raw = bytearray(make(kind, 64, torch.float32).payload.pack().tolist())
    struct.pack_into(layout, raw, offset, value)
    with pytest.raises(PayloadError):
        unpack(torch.frombuffer(raw, dtype=torch.uint8))


def test_positions_of_codes_in_a_longer_form_are_refused() -> None:
    payload = make("sparse_codes", 64, torch.float32).payload
    assert isinstance(payload, SparseCodes)
    bitmap = bitmap_of(payload.positions, 64)
    longer = torch.cat([payload.pack()[:-3], bitmap])  # instead of three indices of 6 bits
    longer[4] = 1
    with pytest.raises(PayloadError, match="shorter indices"):
        unpack(longer)


def test_an_index_outside_its_group_is_noticed_even_where_indices_ascend() -> None:
    """Groups of 10 have 4-bit indices, which can be up to 15: an index of 13 would belong to the next group."""
    packed = GroupSparse(20, 10, 1, torch.ones(2), torch.tensor([3, 5])).pack()
    packed[-1] = 13 | 5 << 4
    with pytest.raises(PayloadError, match="outside its group of 10"):
        unpack(packed)


def test_groups_of_billions_are_no_reason_to_allocate_as_much() -> None:
    packed = GroupSparse(20, 20, 1, torch.ones(1), torch.tensor([3])).pack()
    packed[16:24] = 255
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert unpack(packed).to_dense().nonzero().tolist() == [[3]]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024, "kB beyond the peak so far"


@pytest.mark.parametrize("num_entries", [0, 1, 1000, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", sorted(Payload.kinds))
def test_claims_of_billions_of_elements_allocate_nothing(kind: int, num_entries: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for numel in (2**32 - 1, 65535**2):
        for flags in range(3):
            for fixed in (
                b"",
                struct.pack("<II", 1, 1),
                struct.pack("<II", 2**32 - 1, 1),
                struct.pack("<II", 0, 0x101),
            ):
                header = struct.pack("<HBBHHII", 0x4757, kind, 0, flags, 0, numel, num_entries)
                try:
                    unpack(torch.frombuffer(bytearray(header + fixed), dtype=torch.uint8))
                except PayloadError:
                    continue
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 * 1024, "kB beyond the peak so far"
