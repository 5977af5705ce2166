"""Damaged and hostile buffers: each decodes to a valid payload or raises PayloadError, at low cost."""

from __future__ import annotations

import random
import resource
import struct

import pytest
import torch

from collectives.payloads import GroupSparse, SparseCodes
from collectives.payloads.base import Payload, PayloadError, unpack
from collectives.payloads.codec.index_sets import bitmap_of
from tests.testing.mutations import mutated, outcome_of
from tests.testing.payloads import make

NUM_MUTATIONS = 20_000
NUM_BATCHES = 10


@pytest.mark.loops
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_mutation_decodes_validly_or_raises_the_one_error(batch: int) -> None:
    rng = random.Random(batch)
    outcomes = [outcome_of(mutated(rng)) for _ in range(NUM_MUTATIONS // NUM_BATCHES)]
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


def test_positions_of_codes_in_a_longer_form_are_refused() -> None:
    payload = make("sparse_codes", 64, torch.float32).payload
    assert isinstance(payload, SparseCodes)
    bitmap = bitmap_of(payload.positions, 64)
    longer = torch.cat([payload.pack()[:-3], bitmap])  # instead of three indices of 6 bits
    longer[4] = 1
    with pytest.raises(PayloadError, match="shorter indices"):
        unpack(longer)


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_to_one_field_is_noticed(name: str) -> None:
    kind, layout, offset, value = DAMAGE[name]
    raw = bytearray(make(kind, 64, torch.float32).payload.pack().tolist())
    struct.pack_into(layout, raw, offset, value)
    with pytest.raises(PayloadError):
        unpack(torch.frombuffer(raw, dtype=torch.uint8))


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
