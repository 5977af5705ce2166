"""Turns: what is measured side by side takes turns, so that all of it sees the machine fast and slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, item), every item once per round; each round starts one further, so nobody keeps a neighbour."""
    for round_ in range(rounds):
        start = round_ % len(items)
        for item in [*items[start:], *items[:start]]:
            yield round_, item
