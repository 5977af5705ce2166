"""Tally: how often each thing was tried, how it ended, and what went wrong."""

from __future__ import annotations

import collections
import time


class Tally:
    """Counts of one part of the attack.

    Args:
        name: of the part.
        until: when to stop, in seconds of `time.monotonic`.

    Attributes:
        failures: one text for each thing that went wrong.
    """

    def __init__(self, name: str, until: float) -> None:
        self.name = name
        self.failures: list[str] = []
        self._until = until
        self._counts: collections.Counter[str] = collections.Counter()

    def has_time(self) -> bool:
        """Whether another try may begin."""
        return time.monotonic() < self._until

    def count(self, what: str, failure: str | None = None) -> None:
        """Note one try and, where it went wrong, why."""
        self._counts[what] += 1
        if failure is not None:
            self.failures.append(f"{what}: {failure}")
            print(f"FAILED {self.name}: {what}: {failure}", flush=True)

    def __str__(self) -> str:
        total = sum(self._counts.values())
        parts = ", ".join(f"{number} {what}" for what, number in sorted(self._counts.items()))
        return f"{self.name}: {total} tries, {len(self.failures)} failures ({parts})"
