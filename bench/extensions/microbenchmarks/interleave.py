"""Order of alternating measurements, so that slow and fast periods of the machine affect all items equally."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def interleave(items: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, item), every item once per round.

    Each round starts one item later than the round before, so that the position in the round varies for every item.
    """
    for round_ in range(rounds):
        start = round_ % len(items)
        for item in [*items[start:], *items[:start]]:
            yield round_, item
