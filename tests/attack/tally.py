"""Counts of the tries by kind and ending, and the failures."""

from __future__ import annotations

import collections
import time


class Tally:
    """Counts of one part of the attack.

    Args:
        name: name of the part.
        until: time at which to stop, in seconds of `time.monotonic`.

    Attributes:
        failures: one text for each failure.
    """

    def __init__(self, name: str, until: float) -> None:
        self.name = name
        self.failures: list[str] = []
        self._until = until
        self._counts: collections.Counter[str] = collections.Counter()

    def has_time(self) -> bool:
        """Return whether another try may begin."""
        return time.monotonic() < self._until

    def count(self, what: str, failure: str | None = None) -> None:
        """Count one try and, if it failed, note why."""
        self._counts[what] += 1
        if failure is not None:
            self.failures.append(f"{what}: {failure}")
            print(f"FAILED {self.name}: {what}: {failure}", flush=True)

    def __str__(self) -> str:
        total = sum(self._counts.values())
        parts = ", ".join(f"{number} {what}" for what, number in sorted(self._counts.items()))
        return f"{self.name}: {total} tries, {len(self.failures)} failures ({parts})"
