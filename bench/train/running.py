"""Running: least, mean and largest of numbers, none of which is kept."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(kw_only=True)
class Running:
    """Of the numbers added until now.

    Attributes:
        count: how many they are.
        total: their sum.
        least, largest: None where there are none.
    """

    count: int = 0
    total: float = 0.0
    least: float | None = None
    largest: float | None = None

    def add(self, value: float) -> None:
        """One more."""
        self.count += 1
        self.total += value
        self.least = value if self.least is None else min(self.least, value)
        self.largest = value if self.largest is None else max(self.largest, value)

    @property
    def mean(self) -> float | None:
        """None where there are none."""
        return self.total / self.count if self.count else None
