"""The waves on which the costs are simulated are exactly the messages that a transport sees."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

import numpy as np
import pytest
import torch

from collectives.allreduce import Ring
from collectives.payloads import Codes, Dense, Sparse
from collectives.payloads.base import Payload
from collectives.payloads.sparse import Seeded
from collectives.schedule.rounds import Layout, Leaf, Piece, Round
from collectives.schedule.waves import Ints, Lengths, Wave, of_rounds, waves_of
from collectives.server import Server
from tests.contract.test_requantising_ring import KEY, closed_form, contribution
from tests.contract.test_rounds import Sent, seen
from tests.testing.collectives import COLLECTIVES, key_of, refusal
from tests.testing.payloads import packed_codes
from tests.testing.third_party.star import Star

MOST_RANKS = 9
LENGTH = 9 * 2520
"""All splits into up to nine pieces are multiples of nine, so every rank sends equally many entries of each piece."""


def every_ninth(rank: int) -> Sparse:
    indices = torch.arange(rank, LENGTH, MOST_RANKS)
    return Sparse(LENGTH, indices, torch.ones(len(indices)))


def codes(rank: int) -> Codes:
    return packed_codes(torch.arange(LENGTH) % 16, codebook="levels", bits=4, scales=torch.ones(1), block_numel=0)


def dense(rank: int) -> Dense:
    return Dense(torch.ones(LENGTH))


def half(rank: int) -> Dense:
    return Dense(torch.ones(LENGTH, dtype=torch.float16))


def seeded(rank: int) -> Seeded:
    return Seeded(LENGTH, 7, torch.ones(LENGTH // MOST_RANKS))


def of_seeded(start: int, stop: int) -> int:
    """Return the bytes of a part, which lists the positions of its entries unless it is the whole."""
    if (start, stop) == (0, LENGTH):
        return seeded(0).nbytes
    count = int(((seeded(0).positions >= start) & (seeded(0).positions < stop)).sum())
    return Sparse.packed_nbytes(stop - start, count, torch.float32)


def lengths_of(kind: str) -> Lengths:
    """Return lengths that depend only on the numbers of elements and terms: all ranks send equally many entries."""

    def one(numel: int, terms: int) -> int:
        if kind == "dense" or (kind == "codes" and terms > 1):
            return Dense(torch.empty(numel)).nbytes
        if kind == "half":
            return Dense(torch.empty(numel, dtype=torch.float16)).nbytes
        if kind == "codes" and terms == 1:
            return Codes.packed_nbytes(numel, 4)
        return Sparse.packed_nbytes(numel, numel * terms // MOST_RANKS, torch.float32)

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        if kind == "seeded":
            return np.ones_like(start), np.array(
                [of_seeded(*each) for each in zip(start.tolist(), stop.tolist(), strict=True)]
            )
        numels = (stop - start).tolist()
        return np.ones_like(start), np.array([one(*each) for each in zip(numels, terms.tolist(), strict=True)])

    return Lengths(packed)


def waved(name: str, world_size: int, layout: Layout, lengths: Lengths) -> list[Sent]:
    """Return the messages of each rank by peer, in order."""
    sent: list[Sent] = [{} for _ in range(world_size)]
    for (source, target), nbytes in by_pair(waves_of(COLLECTIVES[name](), world_size, layout, lengths)).items():
        sent[source][target] = nbytes
    return sent


WAVED = [name for name in COLLECTIVES if not re.search("native|pool", name)]
MAKERS = {"dense": dense, "half": half, "seeded": seeded, "sparse": every_ninth, "codes": codes}


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("name", [name for name in WAVED if "direct:segment" not in name])  # those are uneven
def test_waves_are_what_a_transport_counts(name: str, kind: str) -> None:
    for world_size in range(1, MOST_RANKS + 1):
        payloads: list[Payload] = [MAKERS[kind](rank) for rank in range(world_size)]
        if refusal(COLLECTIVES[name](), payloads[0]):
            continue
        layout = Layout.of(payloads[0], key_of(payloads[0]))
        simulated = waved(name, world_size, layout, lengths_of(kind)) if world_size > 1 else [{}]
        assert simulated == seen(name, payloads)


@pytest.mark.parametrize("world_size", [2, 3, 5, 6, 8, 9, 17])
@pytest.mark.parametrize("name", [name for name in WAVED if not name.startswith("hierarchical")])
def test_waves_are_the_rounds_of_all_ranks(name: str, world_size: int) -> None:
    """Covers one element, none, and pieces of different lengths."""

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        return 1 + stop % 2, 8 * (1 + start + 10_000 * stop + 100_000_000 * terms)

    layouts = [Layout.dense(numel, key=(3,)) for numel in (0, 1, 1009)]
    for layout in (*layouts, Layout((Leaf(700), Leaf(309, alignment=8)), (3, 4))):
        collective, lengths = COLLECTIVES[name](), Lengths(packed)
        if isinstance(collective, Server):  # its answers depend on its options, not on its rounds
            collective = dataclasses.replace(collective, downlink="union")
        rounds = [collective.rounds(world_size, rank, layout) or [] for rank in range(world_size)]
        described = of_rounds(rounds, lengths, np.ones(world_size, dtype=np.int64))
        assert by_pair(waves_of(collective, world_size, layout, lengths)) == by_pair(described)


def by_pair(waves: Iterable[Wave] | None) -> dict[tuple[int, int], list[int]]:
    """Return the bytes of each message from one rank to another, in order."""
    assert waves is not None
    sent: dict[tuple[int, int], list[int]] = {}
    for wave in waves:
        for source, target, nbytes in zip(*(each.tolist() for each in wave.messages()), strict=True):
            if nbytes:
                sent.setdefault((source, target), []).append(nbytes)
    return sent


def test_rounds_that_wait_for_each_other_are_refused() -> None:
    waiting = Round(4)
    waiting.receive(1, Piece(0, 1, frozenset([1])))
    with pytest.raises(ValueError, match="never end"):
        list(of_rounds([[waiting], []], Lengths(lambda start, stop, terms: (start, stop)), np.ones(2, dtype=np.int64)))


def test_a_collective_that_only_says_its_rounds_has_waves() -> None:
    lengths, layout = lengths_of("dense"), Layout.dense(LENGTH)
    up, down = waves_of(Star(), 3, layout, lengths) or ()
    assert [sorted(zip(*(each.tolist() for each in wave.messages()), strict=True)) for wave in (up, down)] == [
        [(1, 0, 4 * LENGTH), (2, 0, 4 * LENGTH)],
        [(0, 1, 4 * LENGTH), (0, 2, 4 * LENGTH)],
    ]


def test_messages_of_a_requantising_ring_are_those_of_the_closed_form() -> None:
    term = contribution("qsgd:bits=4", 0, 0, 4)
    assert isinstance(term, Codes)

    def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        assert (terms == 1).all()
        lengths = [Codes.packed_nbytes(int(numel), 4, block_numel=term.block_numel) for numel in stop - start]
        return np.ones_like(start), np.array(lengths)

    sent = np.zeros(4, dtype=np.int64)
    for wave in waves_of(Ring(requantise=True), 4, Layout.of(term, KEY), Lengths(packed)) or ():
        np.add.at(sent, wave.sources, wave.nbytes)
    assert sent.tolist() == [closed_form("qsgd:bits=4", term, rank, 4) for rank in range(4)]
