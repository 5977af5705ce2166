"""Which links the messages of a wave take, and how many of them share each."""

from __future__ import annotations

import numpy as np

from bench.extensions.predict.arrays import Floats
from bench.extensions.predict.links.access import Links
from collectives.schedule.waves import Ints


class Paths:
    """What stays the same of waves between the same ranks, which often come again.

    Attributes:
        alone: no rank sends two messages or receives two, and each has a host of its own.
        inside: which messages stay within a host; None where none does.
        leaving, coming: messages that each rank sends and receives.
        from_hosts, to_hosts: of each message, as what follows.
        latency_s: between these; 0 within one.
        round_trip_s: likewise.
        up_s, down_s: seconds per byte.
    """

    def __init__(self, sources: Ints, targets: Ints, links: Links) -> None:
        n = links.num_ranks
        self.num_hosts = len(links.up_rate)
        self.sources, self.targets = sources, targets
        self.leaving, self.coming = (np.bincount(ranks, minlength=n).astype(float) for ranks in (sources, targets))
        self.from_hosts, self.to_hosts = links.host_of[sources], links.host_of[targets]
        self.alone = links.one_per_host and self.leaving.max() == self.coming.max() == 1
        self.inside = None if links.one_per_host else self.from_hosts == self.to_hosts
        latency_s = links.latency_s[self.from_hosts]
        self.latency_s = latency_s if self.inside is None else np.where(self.inside, 0.0, latency_s)
        round_trip_s = latency_s + links.latency_s[self.to_hosts]
        self.round_trip_s = round_trip_s if self.inside is None else np.where(self.inside, 0.0, round_trip_s)
        self.up_s, self.down_s = 1 / links.up_rate[self.from_hosts], 1 / links.down_rate[self.to_hosts]

    def with_acknowledgements(self, nbytes: Ints, share: float) -> tuple[Floats, Floats]:
        """What messages take of uplinks and of downlinks: a host's share what goes the other way at once."""
        if not share:
            return nbytes.astype(float), nbytes.astype(float)
        hosts = self.num_hosts
        leaving, coming = (np.bincount(ends, nbytes, hosts) for ends in (self.from_hosts, self.to_hosts))
        num_leaving, num_coming = (np.bincount(ends, minlength=hosts) for ends in (self.from_hosts, self.to_hosts))
        up = nbytes + share * (coming / np.maximum(1, num_leaving))[self.from_hosts]
        down = nbytes + share * (leaving / np.maximum(1, num_coming))[self.to_hosts]
        return up, down

    def busiest_s(self, up_bytes: Floats, down_bytes: Floats) -> float:
        """How long the link carries these messages that is the last to be done with them."""
        up = np.bincount(self.from_hosts, up_bytes * self.up_s)
        down = np.bincount(self.to_hosts, down_bytes * self.down_s)
        return float(max(up.max(), down.max()))

    def per_source(self, values: Ints | Floats) -> Floats:
        """The sum over what each rank sends."""
        return np.bincount(self.sources, values, len(self.leaving)).astype(float, copy=False)

    def per_target(self, values: Ints | Floats) -> Floats:
        """The sum over what each rank receives."""
        return np.bincount(self.targets, values, len(self.coming)).astype(float, copy=False)
