"""Counted random numbers."""

from __future__ import annotations

import pytest
import torch

from collectives.payloads.codec.philox import Words, philox4x32, random_words

CPU = torch.device("cpu")
ONES = 2**32 - 1


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_vectors_that_its_authors_publish(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """philox4x32 10 in Random123's kat_vectors."""
    words: Words = tuple(torch.tensor([word]) for word in counter)  # type: ignore[assignment]
    assert tuple(int(word) for word in philox4x32(words, key)) == expected


def test_a_number_depends_on_its_key_and_place_alone() -> None:
    many = random_words(7, 1000, CPU)
    assert torch.equal(random_words(7, 130, CPU), many[:130])
    assert not torch.equal(random_words(8, 1000, CPU), many)
    assert many[64 + 2 * 16 + 5] == philox4x32(_counter(16 + 5), (7, 0))[2]


def _counter(low: int) -> Words:
    zero = torch.zeros(1, dtype=torch.int64)
    return zero + low, zero, zero, zero
