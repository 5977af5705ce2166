"""Estimate how long runs will take from the durations of finished runs."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable

from bench.core.config.run import RunConfig


class Estimate:
    """Durations of finished runs, by configuration."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)

    def learn(self, config: RunConfig, seconds: float | None) -> None:
        """Add the duration of a run, unless it is None."""
        if seconds is not None:
            self._seconds[config.config_id].append(seconds)

    def total_s(self, configs: Iterable[RunConfig]) -> float | None:
        """Return the expected seconds for all of these runs together, or None if no duration is known.

        A run takes the mean of its configuration's durations, or of all durations if its configuration has none.
        """
        if not self._seconds:
            return None
        average = statistics.fmean(seconds for known in self._seconds.values() for seconds in known)
        return sum(statistics.fmean(self._seconds.get(config.config_id, [average])) for config in configs)
