"""Waves of groups of ranks that do the same at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from collectives.rounds.waves import Ints, Wave
from collectives.transport import messages


def repeated(wave: Wave, firsts: Ints) -> Wave:
    """The wave of one group as that of several, whose first ranks these are."""
    sources, targets, nbytes = wave.messages()
    merged = np.tile(np.broadcast_to(wave.merged, nbytes.shape), len(firsts))
    sources, targets = ((firsts[:, None] + ranks).ravel() for ranks in (sources, targets))
    return Wave(sources, targets, np.tile(nbytes, len(firsts)), merged=merged)


def together(waves: Iterable[Wave | None]) -> Wave:
    """Waves of different ranks as one."""
    there = [wave for wave in waves if wave is not None]
    sources, targets, nbytes = (np.concatenate(parts) for parts in zip(*(w.messages() for w in there), strict=True))
    return Wave(
        sources, targets, nbytes, merged=np.concatenate([np.broadcast_to(w.merged, len(w.sources)) for w in there])
    )


def spread(groups: Sequence[range], nbytes: int) -> Iterator[Wave]:
    """A message from every group's first rank to its others, down a binomial tree; the first group is the largest."""
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
