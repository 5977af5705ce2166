"""The link of one rank's virtual host: what the kernel counted on it, and how much of its time that filled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Self

from bench.core.collectives_config import CollectivesConfig
from bench.core.interface import interface_bytes
from collectives.transport import Transport


@dataclasses.dataclass(kw_only=True)
class Link:
    """One host's link; every rank must call each method, and the ranks of one host count the same frames.

    Attributes:
        exists: the ranks are on virtual hosts; without, nothing is counted.
        uplink_bps, downlink_bps: this host's rates; None: not limited.
        slowest: (slowest uplink, slowest downlink) of all hosts, likewise.
        sent, received: bytes of whole frames per sum, in the turns so far.
    """

    exists: bool
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    slowest: tuple[float | None, float | None] = (None, None)
    sent: list[float] = dataclasses.field(default_factory=list)
    received: list[float] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, config: CollectivesConfig, rank: int) -> Self:
        """The link of the host that holds this rank."""
        if config.cluster is None:
            return cls(exists=False)
        hosts = config.cluster["hosts"]
        own = hosts[rank // config.ranks_per_host]
        uplinks, downlinks = ([host[name] for host in hosts if host[name]] for name in ("uplink_bps", "downlink_bps"))
        return cls(
            exists=True,
            uplink_bps=own["uplink_bps"],
            downlink_bps=own["downlink_bps"],
            slowest=(min(uplinks, default=None), min(downlinks, default=None)),
        )

    @contextlib.contextmanager
    def counting(self, transport: Transport, num_sums: int) -> Iterator[None]:
        """Count what passes inside the block, in which so many sums are made; ranks enter and leave it together."""
        if not self.exists:
            yield
            return
        transport.barrier()
        before = interface_bytes()
        yield
        transport.barrier()  # a backend returns before the kernel has sent everything
        now = interface_bytes()
        self.sent.append((now.sent - before.sent) / num_sums)
        self.received.append((now.received - before.received) / num_sums)

    def columns(self, transport: Transport, time_s: float) -> dict[str, float | None]:
        """`uplink_bps`, `downlink_bps`, `wire_bytes_sent` and `of_limit`, for sums that took `time_s` seconds."""
        if not self.exists:
            return dict.fromkeys(("uplink_bps", "downlink_bps", "wire_bytes_sent", "of_limit"))
        sent, received = (sum(counts) / len(counts) for counts in (self.sent, self.received))
        (mean_sent,) = transport.agree([sent / transport.world_size], "sum")
        least_s = max(
            8 * sent / self.uplink_bps if self.uplink_bps else 0.0,
            8 * received / self.downlink_bps if self.downlink_bps else 0.0,
        )
        (least_s,) = transport.agree([least_s], "max")
        return {
            "uplink_bps": self.slowest[0],
            "downlink_bps": self.slowest[1],
            "wire_bytes_sent": mean_sent,
            "of_limit": least_s / time_s if least_s else None,
        }
