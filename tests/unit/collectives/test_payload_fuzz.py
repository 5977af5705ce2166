"""Damaged and hostile buffers: each decodes to a valid payload or raises PayloadError, nothing else, and cheaply."""

from __future__ import annotations

import functools
import random
import resource
import struct
from collections.abc import Callable

import pytest
import torch

from collectives.payloads import GroupSparse
from collectives.payloads.base import HEADER_BYTES, Payload, PayloadError, unpack
from tests.testing.payloads import FLOATS, MAKERS, make

NUM_MUTATIONS = 20_000
NUM_BATCHES = 10
TELLING = (0, 1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
HEADER_FIELDS = (("<H", 0), ("<B", 2), ("<B", 3), ("<H", 4), ("<H", 6), ("<I", 8), ("<I", 12))
FIXED_FIELDS = tuple(("<I", HEADER_BYTES + offset) for offset in range(0, 24, 4))

Mutation = Callable[[bytearray, random.Random], bytearray]


@functools.cache
def corpus() -> list[bytes]:
    """Every kind and type at a few lengths, packed."""
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


def swap_fields(raw: bytearray, rng: random.Random) -> bytearray:
    a, b = rng.sample([4, 6, 8, 10, 12, 14, 16, 18, 20, 22], 2)
    if max(a, b) + 2 <= len(raw):
        raw[a : a + 2], raw[b : b + 2] = raw[b : b + 2], raw[a : a + 2]
    return raw


def change_kind(raw: bytearray, rng: random.Random) -> bytearray:
    raw[2:3] = bytes([rng.randrange(12)])
    return raw


def append_garbage(raw: bytearray, rng: random.Random) -> bytearray:
    return flip_bits(raw, rng) + rng.randbytes(rng.randint(1, 64))


def randomise_body(raw: bytearray, rng: random.Random) -> bytearray:
    return raw[:HEADER_BYTES] + rng.randbytes(rng.randint(0, 200))


MUTATIONS: tuple[Mutation, ...] = (
    truncate,
    flip_bits,
    overwrite_field,
    swap_fields,
    change_kind,
    append_garbage,
    randomise_body,
)


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
    assert payload.entries_between([0, payload.numel]) == [payload.num_entries]
    assert sum(part.numel for part in payload.split(2)) == payload.numel


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_mutation_decodes_validly_or_raises_the_one_error(batch: int) -> None:
    rng, originals = random.Random(batch), corpus()
    decoded = 0
    for _ in range(NUM_MUTATIONS // NUM_BATCHES):
        raw = bytearray(rng.choice(originals))
        for mutation in rng.choices(MUTATIONS, k=rng.choice((1, 1, 2))):
            raw = mutation(raw or bytearray(1), rng)
        try:
            payload = unpack(torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8))
        except PayloadError:
            continue
        assert_valid(payload)
        decoded += 1
    assert 0.05 < decoded / (NUM_MUTATIONS // NUM_BATCHES) < 0.8, "the mutations should reach behind the checks"


DAMAGE = {
    "dense with fewer entries than elements": ("dense", "<I", 12, 63),
    "dense with flags": ("dense", "<H", 4, 1),
    "sparse in an unknown coding": ("sparse", "<H", 4, 3),
    "group sparse in an unknown coding": ("group_sparse", "<H", 4, 2),
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


def test_an_index_outside_its_group_is_noticed_even_where_indices_ascend() -> None:
    """Groups of 10 have 4-bit indices, which reach to 15: one of 13 would fall into the next group."""
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
