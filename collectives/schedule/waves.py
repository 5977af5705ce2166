"""Waves: arrays of the messages that all ranks send in one step of a sum; a sum is a list of waves.

Predictions and `auto` use waves; the author of a collective writes only rounds. The rounds of all ranks describe the
same messages, but rounds list the contributing ranks of each piece, which takes too much memory for thousands of ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from collectives.allreduce import Allgather, HalvingDoubling, Native, Ring, Tree
from collectives.base import Collective
from collectives.direct import Direct
from collectives.hierarchical import Hierarchical
from collectives.payloads.base import HEADER_BYTES
from collectives.schedule.rounds import Layout, PieceMessage, Place, Round
from collectives.server import Server, Shard
from collectives.transport import messages

Ints = npt.NDArray[np.int64]


class Wave(NamedTuple):
    """Messages that depend only on earlier waves: a rank sends them once it has received its messages of those waves.

    Attributes:
        sources: ranks that send, int [messages]; if `each_to_each`, int [s].
        targets: ranks that receive, int [messages]; if `each_to_each`, int [t].
        nbytes: bytes of the messages, int [messages]; if `each_to_each`, broadcastable to [s, t].
        each_to_each: True if every source sends to every target except itself.
        merged: True if receivers add the message to their own elements; bool [messages], or one bool for all.
    """

    sources: Ints
    targets: Ints
    nbytes: Ints
    each_to_each: bool = False
    merged: npt.NDArray[np.bool_] | bool = False

    def messages(self) -> tuple[Ints, Ints, Ints]:
        """Return the source, target and bytes of each message, int [messages] each.

        If `each_to_each`, there is one message from each source to each target, except from a rank to itself.
        """
        if not self.each_to_each:
            return self.sources, self.targets, self.nbytes
        shape = len(self.sources), len(self.targets)
        sources, targets = np.broadcast_to(self.sources[:, None], shape), np.broadcast_to(self.targets, shape)
        others = sources != targets
        return sources[others], targets[others], np.broadcast_to(self.nbytes, shape)[others]


@dataclasses.dataclass(frozen=True)
class Lengths:
    """A rule that computes the bytes of messages from the pieces (ranges of elements) in them.

    Attributes:
        packed: (start, stop, terms) -> (payloads, bytes), for packed pieces; int [pieces] each. The arguments are each
            piece's first element, one past its last element, and the number of contributions merged in it. The results
            are the number of payloads in each piece and their total bytes. If a piece has several payloads, each is
            padded to a multiple of 8 bytes.
        itemsize: bytes of an element if messages are parts of a wire tensor (an element-wise payload's tensor); None if
            messages are packed payloads.
    """

    packed: Callable[[Ints, Ints, Ints], tuple[Ints, Ints]]
    itemsize: int | None = None

    def alone(self, start: Ints, stop: Ints, terms: Ints | int) -> Ints:
        """Return the bytes of messages with one piece (range of elements) each, int [messages].

        Args:
            start: first element of each piece, int [messages].
            stop: one past the last element of each piece, int [messages].
            terms: number of contributions merged in each piece, int [messages], or one number for all.
        """
        pieces = np.arange(len(start))
        return self.joined(start, stop, terms, pieces, pieces + 1)

    def joined(self, start: Ints, stop: Ints, terms: Ints | int, first: Ints, last: Ints) -> Ints:
        """Return the bytes of messages with several pieces (ranges of elements) each, int [messages].

        Args:
            start: first element of each piece, int [pieces].
            stop: one past the last element of each piece, int [pieces].
            terms: number of contributions merged in each piece, int [pieces], or one number for all.
            first: index of the first piece of each message, int [messages].
            last: one past the index of the last piece of each message, int [messages].
        """
        if self.itemsize is not None:
            return self.itemsize * _sums(stop - start, first, last)
        payloads, nbytes = self.packed(start, stop, np.broadcast_to(terms, start.shape))
        several = _sums(payloads, first, last)
        padded = _bundled(several, _sums(_padded(nbytes), first, last))
        return np.where(several == 1, _sums(nbytes, first, last), padded)

    def answered_densely(self, starts: Ints | None = None) -> Lengths:
        """Return a copy of this rule for pieces that are sent as dense fp32.

        If `starts` is given, only the pieces whose first element is in `starts` are dense.
        """

        def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
            nbytes = HEADER_BYTES + 4 * (stop - start)
            if starts is None:
                return np.ones_like(start), nbytes
            is_dense = np.isin(start, starts)
            others, as_they_were = self.packed(start, stop, terms)
            return np.where(is_dense, 1, others), np.where(is_dense, nbytes, as_they_were)

        return Lengths(packed)

    def kept_apart(self) -> Lengths:
        """Return a copy of this rule for pieces whose contributions are sent as separate payloads, not merged."""

        def packed(start: Ints, stop: Ints, terms: Ints) -> tuple[Ints, Ints]:
            payloads, nbytes = self.packed(start, stop, np.ones_like(terms))
            several = payloads * terms
            bundle_of_one = _bundled(np.full_like(terms, 0), _padded(nbytes))
            return several, np.where(several == 1, bundle_of_one, _padded(nbytes) * terms)

        return Lengths(packed)

    def cut_at(self, cuts: Sequence[tuple[int, int]]) -> Lengths:
        """Return a copy of this rule for sums that consist of one payload per range (start, stop) in `cuts`."""

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


def _as_arrays(stretches: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    # (first elements, elements after the last ones)
    start, stop = np.array(stretches, dtype=np.int64).reshape(-1, 2).T
    return start, stop


def of_rounds(by_rank: Sequence[Sequence[Round]], lengths: Lengths, weights: Ints) -> Iterator[Wave]:
    """Yield the waves of messages that the rounds of all ranks describe.

    Args:
        by_rank: the rounds of each rank.
        lengths: computes the bytes of messages.
        weights: number of contributions that each rank's payload contains, int [ranks].

    Raises:
        ValueError: the rounds do not match: a rank waits for a message that no rank sends.
    """
    ranks = [_Progress(rank, list(rounds)[::-1]) for rank, rounds in enumerate(by_rank)]
    under_way: collections.Counter[tuple[int, int]] = collections.Counter()
    while any(rank.left for rank in ranks):
        sent = [(rank.rank, round_, message) for rank in ranks for round_, message in rank.advance(under_way)]
        if not sent and not any(rank.moved for rank in ranks):
            raise ValueError("these rounds never end: a rank waits for a message that no rank sends")
        under_way.update((source, message.peer) for source, _, message in sent)
        if sent:
            nbytes, merged = [], []
            for _, round_, message in sent:
                start, stop = _as_arrays([(piece.start, piece.stop) for piece in message.pieces])
                terms = np.array([weights[list(piece.terms)].sum() for piece in message.pieces])
                of_round = dataclasses.replace(lengths, itemsize=round_.itemsize)
                nbytes.append(of_round.joined(start, stop, terms, np.array([0]), np.array([len(start)])))
                merged.append(terms[0] < weights.sum())
            sources, targets = np.array([(source, message.peer) for source, _, message in sent]).T
            yield Wave(sources, targets, np.concatenate(nbytes), merged=np.array(merged))


@dataclasses.dataclass
class _Progress:
    rank: int
    left: list[Round]  # the next round is the last in the list
    moved: bool = False
    _has_sent: bool = False

    def advance(self, under_way: collections.Counter[tuple[int, int]]) -> Iterator[tuple[Round, PieceMessage]]:
        """Yield the messages that this rank can send before it must wait for a message from another rank.

        `under_way` counts, by (source, target), the messages that were sent and not yet received; messages that the
        rank receives in this call are removed from it.
        """
        self.moved = False
        while self.left:
            round_ = self.left[-1]
            if not self._has_sent:
                yield from ((round_, message) for message in round_.sends)
                self._has_sent = self.moved = True
            needed = collections.Counter(message.peer for message in round_.receives)
            if any(under_way[peer, self.rank] < count for peer, count in needed.items()):
                return
            for peer, count in needed.items():
                under_way[peer, self.rank] -= count
            self.left.pop()
            self._has_sent, self.moved = False, True


def _bundled(payloads: Ints, nbytes: Ints) -> Ints:
    # `Bundle.packed_nbytes` for arrays; a single payload is not bundled
    return np.where(payloads == 1, nbytes, HEADER_BYTES + _padded(4 + 4 * payloads) + nbytes)


def _padded(nbytes: Ints) -> Ints:
    return -(-nbytes // 8) * 8


def _sums(values: Ints, first: Ints, last: Ints) -> Ints:
    until: Ints = np.concatenate([[0], np.cumsum(values)])
    return until[last] - until[first]


def waves_of(
    collective: Collective, world_size: int, layout: Layout, lengths: Lengths, weights: Ints | None = None
) -> Iterable[Wave] | None:
    """Return the messages of all ranks in one sum, in waves that ranks send one after another.

    Return None if the collective does not describe its messages (`Collective.rounds` returns None).

    The waves of the collectives in this project are computed for all ranks at once; the waves of other collectives are
    derived from the rounds of every rank.

    Args:
        collective: the collective.
        world_size: number of ranks, two or more.
        layout: sizes and dtypes of the payloads, the same on all ranks.
        lengths: computes the bytes of messages.
        weights: number of contributions that each rank's payload contains, int [world_size]; None for one each.
    """
    weights = np.ones(world_size, dtype=np.int64) if weights is None else weights
    author = next(cls for cls in type(collective).__mro__ if "rounds" in vars(cls))
    if author in _OF_CLASS:
        return _OF_CLASS[author](collective, world_size, layout, lengths, weights)
    by_rank = [collective.rounds(world_size, rank, layout) for rank in range(world_size)]
    if any(rounds is None for rounds in by_rank):
        return None
    return of_rounds([rounds or [] for rounds in by_rank], lengths, weights)


def _ring(collective: Ring | Native, n: int, layout: Layout, lengths: Lengths, weights: Ints) -> Iterator[Wave]:
    """Yield the messages of a ring all-reduce, step by step; also used for the backend's own all-reduce."""
    start, stop = _as_arrays(layout.chunks(n))
    ranks, lengths = np.arange(n), dataclasses.replace(lengths, itemsize=layout.itemsize)
    contributions = np.concatenate([[0], np.cumsum(np.tile(weights, 2))])
    following = (ranks + 1) % n
    for index in range(2 * (n - 1)):
        chunk = (ranks - index) % n
        terms = contributions[chunk + min(index + 1, n)] - contributions[chunk]
        if collective.recodes:  # a sum is as long as one contribution
            terms = np.ones_like(terms)
        yield Wave(ranks, following, lengths.alone(start[chunk], stop[chunk], terms), merged=index < n - 1)


def _halving_doubling(
    collective: HalvingDoubling, world_size: int, layout: Layout, lengths: Lengths, weights: Ints
) -> Iterator[Wave]:
    start, stop = _as_arrays(collective.cuts(world_size, layout))
    p, ranks = len(start), np.arange(len(start))
    beyond, lengths = np.arange(p, world_size), dataclasses.replace(lengths, itemsize=layout.itemsize)
    all_start, all_stop = np.full_like(beyond, start[0]), np.full_like(beyond, stop[-1])
    yield Wave(beyond, beyond - p, lengths.alone(all_start, all_stop, weights[p:]), merged=True)
    terms = weights[:p].copy()
    terms[: len(beyond)] += weights[p:]
    distances = [p >> bit for bit in range(1, p.bit_length())]  # p/2, p/4, ..., 1
    for distance in distances:
        first = (ranks ^ distance) // distance * distance
        nbytes = lengths.alone(start[first], stop[first + distance - 1], terms)
        yield Wave(ranks, ranks ^ distance, nbytes, merged=True)
        terms = terms + terms[ranks ^ distance]
    everyone = int(weights.sum())
    for distance in reversed(distances):
        first = ranks // distance * distance
        yield Wave(ranks, ranks ^ distance, lengths.joined(start, stop, everyone, first, first + distance))
    whole = lengths.joined(start, stop, everyone, np.zeros_like(beyond), np.full_like(beyond, p))
    yield Wave(beyond - p, beyond, whole)


def _tree(collective: Tree, world_size: int, layout: Layout, lengths: Lengths, weights: Ints) -> Iterator[Wave]:
    start, stop = _as_arrays(collective.segments(layout))
    below = weights.copy()
    everyone, lengths = int(below.sum()), dataclasses.replace(lengths, itemsize=layout.itemsize)
    children = np.arange(1, world_size)
    parents, depths = (children - 1) // 2, np.log2(children + 1).astype(np.int64)
    height = int(depths[-1])
    for depth in range(height, 0, -1):
        np.add.at(below, parents[depths == depth], below[children[depths == depth]])
    for time in range(len(start) + 2 * height - 1):
        up, down = time - (height - depths), time - (height + depths - 1)
        rising, falling = (up >= 0) & (up < len(start)), (down >= 0) & (down < len(start))
        up, down = up[rising], down[falling]
        risen = lengths.alone(start[up], stop[up], below[children[rising]])
        fallen = lengths.alone(start[down], stop[down], everyone)
        yield Wave(
            np.concatenate([children[rising], parents[falling]]),
            np.concatenate([parents[rising], children[falling]]),
            np.concatenate([risen, fallen]),
            merged=np.arange(len(risen) + len(fallen)) < len(risen),
        )


def _allgather(_: Allgather, world_size: int, layout: Layout, lengths: Lengths, weights: Ints) -> list[Wave]:
    ranks, start = np.arange(world_size), np.zeros(world_size, dtype=np.int64)
    nbytes = lengths.alone(start, start + layout.numel, weights)
    return [Wave(ranks, ranks, nbytes[:, None], each_to_each=True)]


def _direct(collective: Direct, n: int, layout: Layout, lengths: Lengths, weights: Ints) -> Iterable[Wave] | None:
    if collective.measures(n):
        return None
    lengths = dataclasses.replace(lengths, itemsize=layout.itemsize)
    segments = collective.owned(n, layout)
    return itertools.starmap(
        functools.partial(_sums_and_contributions, lengths=lengths, weights=weights),
        itertools.pairwise([{}, *segments, {}]),
    )


def _sums_and_contributions(
    summed: dict[int, Place], contributed: dict[int, Place], *, lengths: Lengths, weights: Ints
) -> Wave:
    """Return the messages of one round: sums from their owners to all ranks, and contributions to their owners."""
    ranks = np.arange(len(weights))
    waves = []
    for places, rises in ((contributed, True), (summed, False)):
        owners = np.repeat(np.array([*places], dtype=np.int64), len(ranks))
        others = np.tile(ranks, len(places))
        start, stop = (np.repeat(ends, len(ranks)) for ends in _as_arrays([place[:2] for place in places.values()]))
        nbytes = lengths.alone(start, stop, weights[others] if rises else int(weights.sum()))
        is_sent = (owners != others) & ((start < stop) | (lengths.itemsize is None))
        sources, targets = (others, owners) if rises else (owners, others)
        waves.append(Wave(sources[is_sent], targets[is_sent], nbytes[is_sent], merged=rises))
    return _together(waves)


def _server(collective: Server, world_size: int, layout: Layout, lengths: Lengths, weights: Ints) -> list[Wave]:
    ranks = np.arange(world_size)
    by_server: dict[int, list[Shard]] = {}
    for shard in collective.shards(world_size, layout):
        by_server.setdefault(shard.server, []).append(shard)
    shards = [shard for server in by_server.values() for shard in server]
    start, stop = _as_arrays([shard.place[:2] for shard in shards])
    last = np.cumsum([len(server) for server in by_server.values()])
    first = np.concatenate([[0], last[:-1]])
    servers = np.array(list(by_server))
    pushed, rows = np.unique(weights, return_inverse=True)
    push = np.stack([lengths.joined(start, stop, terms, first, last) for terms in pushed.tolist()])
    stays = np.array([shard.elementwise for shard in shards])
    answers = lengths.answered_densely(start[~stays]) if collective.downlink == "dense" else lengths
    pull = answers.joined(start, stop, 1 if collective.recodes else int(weights.sum()), first, last)
    return [
        Wave(ranks, servers, push[rows if len(pushed) > 1 else [0]], each_to_each=True, merged=True),
        Wave(servers, ranks, pull[:, None], each_to_each=True),
    ]


def _hierarchical(
    collective: Hierarchical, world_size: int, layout: Layout, lengths: Lengths, weights: Ints
) -> Iterable[Wave] | None:
    groups, between = collective.groups(world_size), collective.between
    # Groups sum at the same time; the last group may be smaller than the others.
    by_size: list[Iterable[Wave]] = []
    for size in {len(group) for group in groups} - {1}:
        of_group = waves_of(collective.within, size, layout, lengths)
        if of_group is None:
            return None
        firsts = np.array([group.start for group in groups if len(group) == size])
        by_size.append(map(functools.partial(_repeated, firsts=firsts), of_group))
    inner = (_together(waves) for waves in itertools.zip_longest(*by_size))
    if len(groups) == 1:
        return inner
    leaders, sizes = np.array([(group.start, len(group)) for group in groups]).T
    everything = [(0, layout.numel)]
    if not collective.keeps_kinds(layout) and collective.gathers:
        lengths, cuts = lengths.kept_apart(), everything
    else:
        if not collective.keeps_kinds(layout):
            layout, lengths = Layout.dense(layout.numel), lengths.answered_densely()
        elif layout.itemsize is None and collective.group_size > 1:
            lengths = lengths.cut_at(collective.within.cuts(collective.group_size, layout))
        cuts = [cut for cut in between.cuts(len(groups), layout) if cut[0] < cut[1]] or everything
    outer = waves_of(between, len(groups), layout, lengths, sizes)
    if outer is None:
        return None
    among_leaders = (wave._replace(sources=leaders[wave.sources], targets=leaders[wave.targets]) for wave in outer)
    whole = dataclasses.replace(lengths, itemsize=layout.itemsize).joined(
        *_as_arrays(cuts), world_size, np.array([0]), np.array([len(cuts)])
    )
    return itertools.chain(inner, among_leaders, _spread(groups, int(whole[0])))


def _repeated(wave: Wave, firsts: Ints) -> Wave:
    sources, targets, nbytes = wave.messages()
    merged = np.tile(np.broadcast_to(wave.merged, nbytes.shape), len(firsts))
    sources, targets = ((firsts[:, None] + ranks).ravel() for ranks in (sources, targets))
    return Wave(sources, targets, np.tile(nbytes, len(firsts)), merged=merged)


def _together(waves: Iterable[Wave | None]) -> Wave:
    # waves of different ranks
    there = [wave for wave in waves if wave is not None]
    sources, targets, nbytes = (np.concatenate(parts) for parts in zip(*(w.messages() for w in there), strict=True))
    merged = np.concatenate([np.broadcast_to(w.merged, len(w.sources)) for w in there])
    return Wave(sources, targets, nbytes, merged=merged)


def _spread(groups: Sequence[range], nbytes: int) -> Iterator[Wave]:
    """Yield the messages, step by step, of a broadcast of `nbytes` down a binomial tree from each group's first rank.

    The first group must be the largest.
    """
    size = len(groups[0])
    places = np.arange(1, size)
    parents = np.array([messages.binomial_links(place, size)[0] for place in places.tolist()], dtype=np.int64)
    levels = np.array([place.bit_count() for place in places.tolist()], dtype=np.int64)
    starts, stops = np.array([(group.start, group.stop) for group in groups]).T
    for level in range(1, size.bit_length() + 1):
        here = levels == level
        targets, sources = ((starts[:, None] + each[here]).ravel() for each in (places, parents))
        there = targets < np.repeat(stops, np.count_nonzero(here))
        yield Wave(sources[there], targets[there], np.full(np.count_nonzero(there), nbytes))


# By the class that defines `rounds`.
_OF_CLASS: dict[type, Callable[..., Iterable[Wave] | None]] = {
    Ring: _ring,
    Native: _ring,
    HalvingDoubling: _halving_doubling,
    Tree: _tree,
    Allgather: _allgather,
    Direct: _direct,
    Server: _server,
    Hierarchical: _hierarchical,
}
