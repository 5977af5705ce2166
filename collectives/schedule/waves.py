"""Wave: what all ranks send in one step, as arrays; a sum is a list of waves, for thousands of ranks as for two.

The rounds of every rank (`collectives/schedule/rounds.py`) say the same message for message, but name the contributions in
each piece one by one, which for thousands of ranks would fill the memory.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from collectives.payloads.base import HEADER_BYTES
from collectives.schedule.rounds import Message, Piece, Round

Ints = npt.NDArray[np.int64]


class Wave(NamedTuple):
    """Messages that wait for nothing but earlier waves: a rank sends once it has what these sent it.

    Attributes:
        sources, targets: ranks, int [messages]; with `each_to_each` [s] and [t], and every source sends to every target
            but itself.
        nbytes: int [messages]; with `each_to_each` whatever can be broadcast to [s, t].
        each_to_each: see there.
        merged: whether receivers add it to what they have; of each message, or of all.
    """

    sources: Ints
    targets: Ints
    nbytes: Ints
    each_to_each: bool = False
    merged: npt.NDArray[np.bool_] | bool = False

    def messages(self) -> tuple[Ints, Ints, Ints]:
        """(sources, targets, nbytes), one by one; take care with thousands of ranks."""
        if not self.each_to_each:
            return self.sources, self.targets, self.nbytes
        shape = len(self.sources), len(self.targets)
        sources, targets = np.broadcast_to(self.sources[:, None], shape), np.broadcast_to(self.targets, shape)
        others = sources != targets
        return sources[others], targets[others], np.broadcast_to(self.nbytes, shape)[others]

    def renumbered(self, ranks: Ints) -> Wave:
        """The same among other ranks: what rank i here is called there."""
        return self._replace(sources=ranks[self.sources], targets=ranks[self.targets])


class PackedSizes(Protocol):
    """How long packed pieces are, asked for many at once."""

    def __call__(self, start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        """(payloads in each piece, their bytes together, where there are several each filled up to 8).

        Args:
            start: first elements, int [pieces].
            stop: those past the last, likewise.
            terms: how many ranks' contributions are in each, likewise; of several, the union of what they send.
        """


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Bytes of messages.

    Attributes:
        packed: of pieces that travel packed.
        itemsize: of an element where bare elements travel; None where payloads travel packed.
    """

    packed: PackedSizes
    itemsize: int | None = None

    def bare(self, itemsize: int | None) -> Lengths:
        """Of bare elements, unless `itemsize` is None."""
        return dataclasses.replace(self, itemsize=itemsize)

    def alone(self, start: Ints, stop: Ints, terms: Ints | int) -> Ints:
        """Bytes of messages of one piece each, int [messages]."""
        if self.itemsize is not None:
            return self.itemsize * (stop - start)
        return _bundled(*self.packed(start, stop, np.broadcast_to(terms, start.shape)))

    def joined(self, start: Ints, stop: Ints, terms: Ints | int, first: Ints, last: Ints) -> Ints:
        """Bytes of messages of several pieces: each holds those from number `first` to the one before `last`."""
        if self.itemsize is not None:
            return self.itemsize * _sums(stop - start, first, last)
        payloads, nbytes = self.packed(start, stop, np.broadcast_to(terms, start.shape))
        several = _sums(payloads, first, last)
        padded = _bundled(several, _sums(_padded(nbytes), first, last))
        return np.where(several == 1, _sums(nbytes, first, last), padded)

    def answered_densely(self, starts: Ints | None = None) -> Lengths:
        """Of the same elements where they come back dense, in fp32: all pieces, or those with these first elements."""

        def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
            payloads, nbytes = np.ones_like(start), HEADER_BYTES + 4 * (stop - start)
            if starts is None:
                return payloads, nbytes
            is_dense = np.isin(start, starts)
            others, as_they_were = self.packed(start, stop, terms)
            return np.where(is_dense, payloads, others), np.where(is_dense, nbytes, as_they_were)

        return Lengths(packed)

    def kept_apart(self) -> Lengths:
        """Of the same elements where contributions are not added but travel side by side."""

        def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
            payloads, nbytes = self.packed(start, stop, np.ones_like(terms))
            several = payloads * terms
            bundle_of_one = _bundled(np.full_like(terms, 0), _padded(nbytes))
            return several, np.where(several == 1, bundle_of_one, _padded(nbytes) * terms)

        return Lengths(packed)

    def cut_at(self, cuts: Sequence[tuple[int, int]]) -> Lengths:
        """Of the same elements where sums are in several payloads, one for each of these stretches."""

        def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
            payloads, nbytes = self.packed(start, stop, terms)
            if len(cuts) == 1:
                return payloads, nbytes
            several, padded = np.zeros_like(start), np.zeros_like(start)
            for first, last in cuts:
                begin, end = np.maximum(start, first), np.minimum(stop, last)
                of_part, part = self.packed(begin, np.maximum(begin, end), terms)
                several += np.where(begin < end, of_part, 0)
                padded += np.where(begin < end, _padded(part), 0)
            is_cut = (terms > 1) & (several > payloads)
            return np.where(is_cut, several, payloads), np.where(is_cut, padded, nbytes)

        return Lengths(packed)


def weights_of(world_size: int) -> Ints:
    """Every rank stands for itself."""
    return np.ones(world_size, dtype=np.int64)


def as_arrays(stretches: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """(first elements, those past the last), int [stretches]."""
    start, stop = np.array(stretches, dtype=np.int64).reshape(-1, 2).T
    return start, stop


def of_rounds(by_rank: Sequence[Sequence[Round]], lengths: Lengths, weights: Ints) -> Iterator[Wave]:
    """The waves of what ranks describe one by one.

    Args:
        by_rank: what each rank does.
        lengths: of packed pieces.
        weights: int [ranks], whose contributions each stands for.

    Raises:
        ValueError: ranks wait for each other, so these are no rounds of one sum.
    """
    ranks = [_Progress(rank, rounds) for rank, rounds in enumerate(by_rank)]
    under_way: dict[tuple[int, int], int] = {}
    while not all(rank.is_done for rank in ranks):
        sent = [(rank.rank, round_, message) for rank in ranks for round_, message in rank.advance(under_way)]
        if not sent and not any(rank.moved for rank in ranks):
            raise ValueError("these rounds never end: a rank waits for a message that nobody sends")
        for source, _, message in sent:
            under_way[source, message.peer] = under_way.get((source, message.peer), 0) + 1
        if sent:
            sources, targets = zip(*((source, message.peer) for source, _, message in sent), strict=True)
            nbytes = [_nbytes(round_, message, lengths, weights) for _, round_, message in sent]
            merged = [_num_terms(message.pieces[0], weights) < weights.sum() for _, _, message in sent]
            yield Wave(np.array(sources), np.array(targets), np.array(nbytes), merged=np.array(merged))


class _Progress:
    """How far one rank has come in its rounds."""

    def __init__(self, rank: int, rounds: Sequence[Round]) -> None:
        self.rank = rank
        self.moved = False
        self._rounds = list(rounds)[::-1]
        self._has_sent = False

    @property
    def is_done(self) -> bool:
        return not self._rounds

    def advance(self, under_way: dict[tuple[int, int], int]) -> Iterator[tuple[Round, Message]]:
        """What it can send with what has come; goes on until it must wait for a message."""
        self.moved = False
        while self._rounds:
            round_ = self._rounds[-1]
            if not self._has_sent:
                yield from ((round_, message) for message in round_.sends)
                self._has_sent = self.moved = True
            needed = collections.Counter(message.peer for message in round_.receives)
            if any(under_way.get((peer, self.rank), 0) < count for peer, count in needed.items()):
                return
            for peer, count in needed.items():
                under_way[peer, self.rank] -= count
            self._rounds.pop()
            self._has_sent, self.moved = False, True


def _nbytes(round_: Round, message: Message, lengths: Lengths, weights: Ints) -> int:
    if round_.itemsize is not None:
        return round_.itemsize * message.numel
    start, stop = np.array([(piece.start, piece.stop) for piece in message.pieces]).T
    terms = np.array([_num_terms(piece, weights) for piece in message.pieces])
    return int(lengths.joined(start, stop, terms, np.array([0]), np.array([len(start)]))[0])


def _num_terms(piece: Piece, weights: Ints) -> int:
    return int(sum(weights[rank] for rank in piece.terms))


def _bundled(payloads: Ints, nbytes: Ints) -> Ints:
    """As `Bundle.packed_nbytes`; a single payload stands for itself."""
    table = 8 * -(-(1 + payloads) // 2)
    return np.where(payloads == 1, nbytes, HEADER_BYTES + table + nbytes)


def _padded(nbytes: Ints) -> Ints:
    return -(-nbytes // 8) * 8


def _sums(values: Ints, first: Ints, last: Ints) -> Ints:
    until: Ints = np.concatenate([[0], np.cumsum(values)])
    sums: Ints = until[last] - until[first]
    return sums
