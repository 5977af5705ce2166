"""Bytes on the wire, computed by hand, and golden vectors that fix the format."""

from __future__ import annotations

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
from collectives.payloads.base import Payload, unpack
from collectives.payloads.codec.value_codes import ValueCoding
from tests.testing.payloads import group_sparse_example, packed_codes, sparse_codes_example, sparse_example

HALF, SINGLE = torch.float16, torch.float32


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def sparse(numel: int, count: int, dtype: torch.dtype = SINGLE) -> Sparse:
    return Sparse(numel, torch.arange(count) * (numel // count), torch.ones(count, dtype=dtype))


GOLDEN: dict[str, tuple[Payload, str]] = {
    "dense": (
        Dense(torch.tensor([1.0, -2.0], dtype=HALF)),
        "5747 01 01 0000 0000 02000000 02000000  003c 00c0",
    ),
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
    "sparse of zeros": (
        Sparse(9, torch.tensor([0, 3]), torch.zeros(2)),
        "5747 02 00 0000 0000 09000000 00000000",
    ),
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


def test_dense() -> None:
    assert Dense(torch.zeros(1000)).nbytes == 16 + 4000
    assert Dense(torch.zeros(1000, dtype=torch.int8)).nbytes == 16 + 1000


@pytest.mark.parametrize(
    ("numel", "count", "dtype", "nbytes"),
    [
        (100_000, 10, SINGLE, 16 + 40 + (17 + 3)),  # 13 low bits: 130 bits; unary 10 + 12 bits
        (1_000_000, 10_000, SINGLE, 16 + 40_000 + (7_500 + 3_203)),  # 6 low bits; unary 10 000 + 15 624 bits
        (1_000_000, 10_000, HALF, 16 + 20_000 + 10_703),
        (256, 2, SINGLE, 16 + 8 + 2),  # one byte each: Elias-Fano needs 14 + 3 bits
        (1_000_000, 400_000, SINGLE, 16 + 1_600_000 + 125_000),  # bitmap
        (1000, 990, SINGLE, 16 + 4000),  # dense: a bitmap needs 3960 + 125
        (1000, 968, SINGLE, 16 + 3872 + 125),  # the last count below 31/32
        (1000, 969, SINGLE, 16 + 4000),
    ],
)
def test_sparse(numel: int, count: int, dtype: torch.dtype, nbytes: int) -> None:
    payload = sparse(numel, count, dtype)
    assert payload.nbytes == payload.pack().numel() == nbytes


def test_a_sparse_payload_never_exceeds_the_dense_one() -> None:
    for count in range(1, 101):
        for dtype in (SINGLE, HALF):
            payload = sparse_example(100, dtype, generator(), density=count / 100).payload
            assert payload.nbytes <= 16 + 100 * dtype.itemsize


def test_wide_sparse_values_travel_dense_under_their_own_id() -> None:
    payload = sparse(100, 99)
    payload.tensor_id = 7
    again = unpack(payload.pack())
    assert isinstance(again, Dense)
    assert again.tensor_id == 7
    assert torch.equal(again.to_dense(), payload.to_dense())


def test_group_sparse_at_full_size() -> None:
    """11 173 962 elements, groups of 1024, k = 10 of fp16: 32.5 bytes per group, one entry in the short last group."""
    numel, full_groups = 11_173_962, 10_912
    local = torch.arange(10).repeat(full_groups) * 100
    indices = torch.cat([local, torch.tensor([73])])
    payload = GroupSparse(numel, 1024, 10, torch.ones(indices.numel(), dtype=HALF), indices)
    assert payload.nbytes == payload.pack().numel() == 16 + 8 + full_groups * 325 // 10 + 2 + 2
    assert 1_063_900 < 3 * payload.nbytes < 1_064_100


@pytest.mark.parametrize(
    ("numel", "group_size", "k", "nbytes"),
    [
        (1024, 256, 3, 24 + 12 * 4 + 12),  # one byte per index
        (1025, 256, 3, 24 + 13 * 4 + 13),  # a last group of one
        (1000, 257, 1, 24 + 4 * 4 + 5),  # nine bits
        (100, 1000, 1, 24 + 4 + 1),  # a single short group: seven bits
        (64, 1, 1, 24 + 64 * 4),  # groups of one need no index
        (64, 8, 4, 24 + 32 * 4 + 8),  # bitmap of 8 bytes instead of 12 of indices
    ],
)
def test_group_sparse(numel: int, group_size: int, k: int, nbytes: int) -> None:
    payload = group_sparse_example(numel, SINGLE, generator(), group_size, k).payload
    assert payload.nbytes == payload.pack().numel() == nbytes


@pytest.mark.parametrize(
    ("numel", "group_size", "k", "coding", "nbytes"),
    [
        (1 << 20, 1024, 10, "two_magnitudes", 24 + 256 * 4 + 10_240 // 4 + (10_240 * 6 // 8 + 26_623 // 8 + 1)),
        (1 << 20, 4096, 64, "two_magnitudes", 24 + 256 * (4 + 16) + (16_384 * 6 // 8 + 32_767 // 8 + 1)),
        (1 << 20, 1024, 1, "two_magnitudes", 24 + 32 * 4 + 256 + 1024 * 10 // 8),  # 32 values share magnitudes
        (1 << 20, 1024, 10, "sigma", 24 + 16 + 10_240 // 4 + (10_240 * 6 // 8 + 26_623 // 8 + 1)),
        (1 << 20, 1024, 10, "int8", 24 + 256 * 4 + 10_240 + (10_240 * 6 // 8 + 26_623 // 8 + 1)),
        (64, 8, 4, "two_magnitudes", 24 + 4 + 8 + 8),  # a bitmap
        (1, 1024, 1, "two_magnitudes", 24 + 4 + 1),
    ],
)
def test_sparse_codes(numel: int, group_size: int, k: int, coding: ValueCoding, nbytes: int) -> None:
    """With 1 % of the entries, 2 bits of value, 0.8 of magnitudes and 8.6 of position: 0.44 of 16 and 10 bits."""
    payload = sparse_codes_example(numel, SINGLE, generator(), coding, group_size, min(k, group_size)).payload
    assert payload.nbytes == payload.pack().numel() == nbytes


def test_indices_of_12_bits() -> None:
    """Pairs (i, j) take three bytes: i & 255; (i >> 8) | ((j & 15) << 4); j >> 4."""
    i, j, shared = 0xABC, 0xDEF, torch.ones(2, dtype=torch.bfloat16)
    codes = SparseCodes(
        8192, 4096, 1, torch.tensor([i, 4096 + j]), "two_magnitudes", shared, torch.zeros(1, dtype=torch.uint8)
    )
    assert codes.pack()[-3:].tolist() == [i & 255, (i >> 8) | ((j & 15) << 4), j >> 4]


def test_zeros_are_header_only() -> None:
    nothing = torch.zeros(4)
    where = torch.tensor([0, 1, 0, 1])
    assert sparse(100, 4).nbytes > Sparse(100, torch.arange(4), nothing).nbytes == 16
    assert GroupSparse(20, 10, 2, nothing, where).nbytes == 24
    assert RowSparse(20, torch.tensor([0, 1]), nothing.view(2, 2)).nbytes == 24
    assert packed_codes(where, codebook="sign", bits=1, scales=torch.zeros(1)).nbytes == 24
    for payload in (Sparse(100, torch.arange(4), nothing), GroupSparse(20, 10, 2, nothing, where)):
        assert payload.num_entries == unpack(payload.pack()).num_entries == 0
        assert not payload.to_dense().any()
        dense = torch.ones(payload.numel)
        payload.clear_in_(dense)
        assert dense.all()


def test_kept_zeros_are_sent() -> None:
    values = torch.tensor([0.0, 1.0])
    assert unpack(Sparse(100, torch.tensor([5, 6]), values).pack()).num_entries == 2


def test_negative_zero_becomes_zero() -> None:
    values = torch.tensor([-0.0, 1.0])
    for payload in (
        Sparse(9, torch.tensor([0, 1]), values),
        GroupSparse(9, 9, 2, values, torch.tensor([0, 1])),
        RowSparse(2, torch.tensor([0, 1]), values[:, None]),
    ):
        assert not payload.values.signbit().any()


def test_row_sparse() -> None:
    """40 of 64 filters of 9 fp16 values: a bitmap of 8 bytes; 2 of 64: one byte each."""
    payload = RowSparse(64 * 9, torch.arange(40), torch.ones(40, 9, dtype=HALF))
    assert payload.nbytes == payload.pack().numel() == 24 + 40 * 18 + 8
    assert RowSparse(64 * 9, torch.arange(2), torch.ones(2, 9, dtype=HALF)).nbytes == 24 + 36 + 2


@pytest.mark.parametrize(
    ("bits", "block_numel", "dtype", "nbytes"),
    [
        (1, 0, SINGLE, 24 + 4 + 126),
        (2, 0, HALF, 24 + 2 + 251),
        (4, 100, HALF, 24 + 11 * 2 + 501),
        (8, 100, SINGLE, 24 + 11 * 4 + 1001),
    ],
)
def test_codes(bits: int, block_numel: int, dtype: torch.dtype, nbytes: int) -> None:
    book = "sign" if bits == 1 else "levels"
    scales = torch.ones(11 if block_numel else 1, dtype=dtype)
    payload = packed_codes(torch.zeros(1001), codebook=book, bits=bits, scales=scales, block_numel=block_numel)
    assert payload.nbytes == payload.pack().numel() == nbytes


def test_symmetric_matrices() -> None:
    assert Triangle.from_matrix(torch.eye(256)).nbytes == 16 + 4 * 256 * 257 // 2
    assert CholeskyFactor.from_factor(torch.eye(256, dtype=HALF)).nbytes == 24 + 2 * 256 * 257 // 2


def test_bundle_lays_members_at_multiples_of_eight() -> None:
    """Table of three members: 16 bytes; members of 17, 20 and 56 bytes take 24, 24 and 56."""
    payloads = [Dense(torch.ones(1, dtype=torch.int8)), Dense(torch.ones(1)), Dense(torch.ones(10))]
    bundle = Bundle(payloads)
    assert bundle.nbytes == bundle.pack().numel() == 16 + 16 + 24 + 24 + 56


def test_seeded() -> None:
    assert Seeded(1000, 1, torch.ones(10, dtype=HALF)).nbytes == 24 + 20
