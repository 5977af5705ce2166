"""Counter-based random numbers."""

from __future__ import annotations

import math

import pytest
import torch

from collectives.payloads import Seeded
from collectives.payloads.codec.philox import Words, philox4x32, random_words, seeded_positions, shared_words
from tests.testing.payloads import DEVICES

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
    """Random123's kat_vectors for philox4x32 10."""
    words: Words = tuple(torch.tensor([word]) for word in counter)  # type: ignore[assignment]
    assert tuple(int(word) for word in philox4x32(words, key)) == expected


def test_a_number_depends_on_its_key_and_place_alone() -> None:
    many = random_words(7, 1000, CPU)
    assert torch.equal(random_words(7, 130, CPU), many[:130])
    assert not torch.equal(random_words(8, 1000, CPU), many)
    assert many[64 + 2 * 16 + 5] == philox4x32(_counter(16 + 5), (7, 0))[2]


def test_two_numbers_share_a_word_with_its_halves_swapped() -> None:
    shared, words = shared_words(7, 300, CPU), random_words(7, 192, CPU)
    assert torch.equal(shared[:64], words[:64])
    assert torch.equal(shared[128:192], words[64:128])
    for first, second in zip(shared[128:192].tolist(), shared[192:256].tolist(), strict=True):
        assert (first >> 16, first & 0xFFFF) == (second & 0xFFFF, second >> 16)
    assert shared.shape == (300,)


@pytest.mark.parametrize("share", [0.5, 0.3, 0.01])
def test_two_that_share_a_word_fall_below_a_bound_independently(share: float) -> None:
    """For a million independent pairs, the share is within 4.5 standard errors with a probability of 99.999 %."""
    pairs = shared_words(3, 1 << 21, CPU).view(-1, 2, 64) < share * 2**32
    both = pairs.all(dim=1).double().mean()
    assert abs(float(both) - share**2) <= 4.5 * math.sqrt(share**2 * (1 - share**2) / (1 << 20))


@pytest.mark.parametrize("device", DEVICES)
def test_positions_of_a_seed_are_drawn_on_the_cpu_and_leave_the_global_generator_alone(device: str) -> None:
    before = torch.random.get_rng_state()
    payload = Seeded(1000, 42, torch.ones(100, device=device))
    assert torch.equal(payload.positions.cpu(), seeded_positions(1000, 100, 42))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("numel", "count"), [(0, 0), (1, 1), (10, 10), (1000, 0), (1000, 249), (1000, 251), (10**9, 20)]
)
def test_seeded_positions_ascend_and_differ_by_seed(numel: int, count: int) -> None:
    positions = seeded_positions(numel, count, 3)
    assert positions.numel() == count
    assert (positions.diff() > 0).all()
    assert count == 0 or 0 <= positions[0] <= positions[-1] < numel
    assert torch.equal(positions, seeded_positions(numel, count, 3))
    if 0 < count < numel:
        assert not torch.equal(positions, seeded_positions(numel, count, 4))


@pytest.mark.parametrize("count", [10, 40])
def test_seeded_positions_are_uniform(count: int) -> None:
    """Each of 100 elements is drawn with probability count / 100: five standard deviations over 500 seeds."""
    drawn = torch.zeros(100)
    for seed in range(500):
        drawn[seeded_positions(100, count, seed)] += 1
    p = count / 100
    assert (drawn - 500 * p).abs().max() < 5 * (500 * p * (1 - p)) ** 0.5


def _counter(low: int) -> Words:
    zero = torch.zeros(1, dtype=torch.int64)
    return zero + low, zero, zero, zero
