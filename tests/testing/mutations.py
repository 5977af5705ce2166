"""Damaged payloads for tests: packed payloads of every kind with random changes, and checks of their decoding."""

from __future__ import annotations

import functools
import random
import struct
from collections.abc import Callable
from typing import Literal

import torch

from collectives.payloads.base import HEADER_BYTES, Payload, PayloadError, unpack
from collectives.payloads.sparse import IndexedValues
from tests.testing.payloads import FLOATS, MAKERS, cut, make

TELLING = (0, 1, 2, 3, 7, 8, 9, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**16, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1)
HEADER_FIELDS = (("<H", 0), ("<B", 2), ("<B", 3), ("<H", 4), ("<H", 6), ("<I", 8), ("<I", 12))
FIXED_FIELDS = tuple(("<I", HEADER_BYTES + offset) for offset in range(0, 24, 4))

Mutation = Callable[[bytearray, random.Random], bytearray]


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
