"""Measure several things alternately, so that each of them sees the machine both when it is fast and when slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def interleave(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, item), every item once per round; each round starts one further, so nobody keeps a neighbour."""
    for round_ in range(rounds):
        start = round_ % len(items)
        for item in [*items[start:], *items[:start]]:
            yield round_, item
