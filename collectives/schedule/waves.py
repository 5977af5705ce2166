"""Waves: arrays of the messages that all ranks send in one step; a sum is a list of waves.

The rounds of all ranks (`collectives/schedule/rounds.py`) describe the same messages, but list the contributing ranks
of each piece, which would need too much memory for thousands of ranks.
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
    """Messages that depend only on earlier waves: a rank sends when it has received those addressed to it.

    Attributes:
        sources, targets: ranks, int [messages]; with `each_to_each` int [s] and int [t].
        nbytes: bytes of the messages, int [messages]; with `each_to_each` broadcastable to [s, t].
        each_to_each: every source sends to every target except itself.
        merged: whether receivers add the message to their own elements, bool [messages] or one bool for all.
    """

    sources: Ints
    targets: Ints
    nbytes: Ints
    each_to_each: bool = False
    merged: npt.NDArray[np.bool_] | bool = False

    def messages(self) -> tuple[Ints, Ints, Ints]:
        """Return sources, targets and bytes of each message; with `each_to_each` s * t of them."""
        if not self.each_to_each:
            return self.sources, self.targets, self.nbytes
        shape = len(self.sources), len(self.targets)
        sources, targets = np.broadcast_to(self.sources[:, None], shape), np.broadcast_to(self.targets, shape)
        others = sources != targets
        return sources[others], targets[others], np.broadcast_to(self.nbytes, shape)[others]

    def renumbered(self, ranks: Ints) -> Wave:
        """Return the same wave with rank i replaced by `ranks[i]`."""
        return self._replace(sources=ranks[self.sources], targets=ranks[self.targets])


class PackedSizes(Protocol):
    """Compute the packed lengths of many pieces at once."""

    def __call__(self, start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
        """Return the number of payloads in each piece and their total bytes, int [pieces] each.

        If a piece has several payloads, each is padded to a multiple of 8 bytes.

        Args:
            start: first elements, int [pieces].
            stop: elements past the last, int [pieces].
            terms: number of ranks whose contributions are in each piece, int [pieces]; several are merged to a union.
        """


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Compute the bytes of messages.

    Attributes:
        packed: computes the lengths of packed pieces.
        itemsize: bytes of an element if elements of a wire tensor travel; None if payloads travel packed.
    """

    packed: PackedSizes
    itemsize: int | None = None

    def bare(self, itemsize: int | None) -> Lengths:
        """Return the lengths of elements of a wire tensor, or of packed payloads if `itemsize` is None."""
        return dataclasses.replace(self, itemsize=itemsize)

    def alone(self, start: Ints, stop: Ints, terms: Ints | int) -> Ints:
        """Return the bytes of messages of one piece each, int [messages]."""
        if self.itemsize is not None:
            return self.itemsize * (stop - start)
        return _bundled(*self.packed(start, stop, np.broadcast_to(terms, start.shape)))

    def joined(self, start: Ints, stop: Ints, terms: Ints | int, first: Ints, last: Ints) -> Ints:
        """Return the bytes of messages of several pieces: message i holds pieces `first[i]` to `last[i] - 1`."""
        if self.itemsize is not None:
            return self.itemsize * _sums(stop - start, first, last)
        payloads, nbytes = self.packed(start, stop, np.broadcast_to(terms, start.shape))
        several = _sums(payloads, first, last)
        padded = _bundled(several, _sums(_padded(nbytes), first, last))
        return np.where(several == 1, _sums(nbytes, first, last), padded)

    def answered_densely(self, starts: Ints | None = None) -> Lengths:
        """Return the lengths if pieces are dense fp32: all pieces, or those whose first element is in `starts`."""

        def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
            payloads, nbytes = np.ones_like(start), HEADER_BYTES + 4 * (stop - start)
            if starts is None:
                return payloads, nbytes
            is_dense = np.isin(start, starts)
            others, as_they_were = self.packed(start, stop, terms)
            return np.where(is_dense, payloads, others), np.where(is_dense, nbytes, as_they_were)

        return Lengths(packed)

    def kept_apart(self) -> Lengths:
        """Return the lengths if contributions are not added, but travel as separate payloads."""

        def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
            payloads, nbytes = self.packed(start, stop, np.ones_like(terms))
            several = payloads * terms
            bundle_of_one = _bundled(np.full_like(terms, 0), _padded(nbytes))
            return several, np.where(several == 1, bundle_of_one, _padded(nbytes) * terms)

        return Lengths(packed)

    def cut_at(self, cuts: Sequence[tuple[int, int]]) -> Lengths:
        """Return the lengths if sums are divided into several payloads, one for each of these stretches."""

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
    """Return a weight of one contribution per rank, int [world_size]."""
    return np.ones(world_size, dtype=np.int64)


def as_arrays(stretches: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Return the first elements and the elements past the last, int [stretches] each."""
    start, stop = np.array(stretches, dtype=np.int64).reshape(-1, 2).T
    return start, stop


def of_rounds(by_rank: Sequence[Sequence[Round]], lengths: Lengths, weights: Ints) -> Iterator[Wave]:
    """Yield the waves that correspond to the rounds of all ranks.

    Args:
        by_rank: the rounds of each rank.
        lengths: computes the lengths of packed pieces.
        weights: the number of contributions that each rank's payload holds, int [ranks].

    Raises:
        ValueError: ranks wait for each other, so the rounds do not match.
    """
    ranks = [_Progress(rank, rounds) for rank, rounds in enumerate(by_rank)]
    under_way: dict[tuple[int, int], int] = {}
    while not all(rank.is_done for rank in ranks):
        sent = [(rank.rank, round_, message) for rank in ranks for round_, message in rank.advance(under_way)]
        if not sent and not any(rank.moved for rank in ranks):
            raise ValueError("these rounds never end: a rank waits for a message that no rank sends")
        for source, _, message in sent:
            under_way[source, message.peer] = under_way.get((source, message.peer), 0) + 1
        if sent:
            sources, targets = zip(*((source, message.peer) for source, _, message in sent), strict=True)
            nbytes = [_nbytes(round_, message, lengths, weights) for _, round_, message in sent]
            merged = [_num_terms(message.pieces[0], weights) < weights.sum() for _, _, message in sent]
            yield Wave(np.array(sources), np.array(targets), np.array(nbytes), merged=np.array(merged))


class _Progress:
    """The progress of one rank through its rounds."""

    def __init__(self, rank: int, rounds: Sequence[Round]) -> None:
        self.rank = rank
        self.moved = False
        self._rounds = list(rounds)[::-1]
        self._has_sent = False

    @property
    def is_done(self) -> bool:
        return not self._rounds

    def advance(self, under_way: dict[tuple[int, int], int]) -> Iterator[tuple[Round, Message]]:
        """Yield the messages that it can send until it must wait for one; remove those it received from `under_way`."""
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
    """Compute `Bundle.packed_nbytes` for arrays; a single payload is not bundled."""
    table = 8 * -(-(1 + payloads) // 2)
    return np.where(payloads == 1, nbytes, HEADER_BYTES + table + nbytes)


def _padded(nbytes: Ints) -> Ints:
    return -(-nbytes // 8) * 8


def _sums(values: Ints, first: Ints, last: Ints) -> Ints:
    until: Ints = np.concatenate([[0], np.cumsum(values)])
    sums: Ints = until[last] - until[first]
    return sums
