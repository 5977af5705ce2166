"""Running statistics: smallest, mean and largest of a series of numbers that is not stored."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(kw_only=True)
class Running:
    """Statistics of the numbers added so far.

    Attributes:
        count: how many numbers were added.
        total: their sum.
        least, largest: the smallest and the largest; None if there are no numbers.
    """

    count: int = 0
    total: float = 0.0
    least: float | None = None
    largest: float | None = None

    def add(self, value: float) -> None:
        """Add a number."""
        self.count += 1
        self.total += value
        self.least = value if self.least is None else min(self.least, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        """Return the mean; None if there are no numbers."""
        return self.total / self.count if self.count else None
