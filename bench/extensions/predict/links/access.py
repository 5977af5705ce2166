"""Access links of hosts, which meet in one switch, and what ranks do for the messages that they carry."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from bench.extensions.predict.arrays import Floats
from bench.extensions.predict.links.paces import TraceClock
from collectives.schedule.waves import Ints


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """What joins the ranks.

    Attributes:
        host_of: of each rank, int [ranks]; messages within a host take no link.
        up_rate: bytes per second that each host can send, float [hosts]; inf: not limited.
        down_rate: that it can receive, likewise.
        up_paces, down_paces: where these are the means of rates that change over time, each host's, or None where its
            own is constant; empty: all are.
        latency_s: one-way delay of what it sends, likewise.
        message_s: what a rank does for one message, sent or received.
        per_byte_s: what it does for one byte, sent or received.
        wake_s: until a rank that waits for a message does something about it.
        crowded_wake_s: the same while more threads compute than there are cores.
        ack_share: of the time that a byte takes of a link, what its acknowledgement takes of the way back.
        carry_byte_s: CPU time of a byte where cores carry all links, those of virtual hosts; 0: none do.
        carriers: cores that do so at once.
    """

    host_of: Ints
    up_rate: Floats
    down_rate: Floats
    latency_s: Floats
    message_s: float = 0.0
    per_byte_s: float = 0.0
    wake_s: float = 0.0
    crowded_wake_s: float = 0.0
    ack_share: float = 0.0
    carry_byte_s: float = 0.0
    carriers: int = 1
    up_paces: Sequence[TraceClock | None] = ()
    down_paces: Sequence[TraceClock | None] = ()

    @classmethod
    def of_hosts(cls, up_rate: Floats, down_rate: Floats, latency_s: Floats, **more: Any) -> Self:
        """One rank per host; `more` by name."""
        hosts = np.arange(len(up_rate))
        return cls(host_of=hosts, up_rate=up_rate, down_rate=down_rate, latency_s=latency_s, **more)

    @property
    def one_per_host(self) -> bool:
        """Whether no two ranks share a host."""
        return np.array_equal(self.host_of, np.arange(len(self.up_rate)))

    @property
    def num_ranks(self) -> int:
        """Ranks on all hosts."""
        return len(self.host_of)

    @property
    def period_s(self) -> float | None:
        """The longest of those after which rates begin anew; None: all are constant."""
        return max((pace.period_s for pace in (*self.up_paces, *self.down_paces) if pace), default=None)
