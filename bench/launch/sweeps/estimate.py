"""How long runs will take, as far as finished runs tell."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable

from bench.core.config.run import RunConfig


class Estimate:
    """Learns from every run that is done."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = collections.defaultdict(list)

    def learn(self, config: RunConfig, seconds: float | None) -> None:
        """Take in how long a run took, where that is known."""
        if seconds is not None:
            self._seconds[config.config_id].append(seconds)

    def total_s(self, configs: Iterable[RunConfig]) -> float | None:
        """Seconds for all of them: what the same configuration took, else what runs took on average; None: no idea."""
        if not self._seconds:
            return None
        average = statistics.fmean(seconds for known in self._seconds.values() for seconds in known)
        return sum(statistics.fmean(self._seconds.get(config.config_id, [average])) for config in configs)
