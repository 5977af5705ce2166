"""The link of one rank's virtual host: what the kernel counted on it, and how much of its time that filled."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Self

from bench.core.config.measurements import CollectivesConfig
from bench.core.counters import ForwarderUse, interface_bytes
from collectives.transport.base import Transport


@dataclasses.dataclass(kw_only=True)
class Link:
    """One host's link; every rank must call each method, and the ranks of one host count the same frames.

    Attributes:
        exists: the ranks are on virtual hosts; without, nothing is counted.
        uplink_bps, downlink_bps: this host's rates; None: not limited.
        sent, received: bytes of whole frames per sum, in the turns so far.
        forwarder_use: of what forwards the frames, if anything but the kernel does.
    """

    exists: bool
    uplink_bps: float | None = None
    downlink_bps: float | None = None
    sent: list[float] = dataclasses.field(default_factory=list)
    received: list[float] = dataclasses.field(default_factory=list)
    forwarder_use: ForwarderUse = dataclasses.field(default_factory=ForwarderUse)

    @classmethod
    def of(cls, config: CollectivesConfig, rank: int) -> Self:
        """The link of the host that holds this rank."""
        if config.cluster is None:
            return cls(exists=False)
        own = config.cluster["hosts"][rank // config.ranks_per_host]
        return cls(exists=True, uplink_bps=own["uplink_bps"], downlink_bps=own["downlink_bps"])

    @contextlib.contextmanager
    def counting(self, transport: Transport, num_sums: int) -> Iterator[None]:
        """Count what passes inside the block, in which so many sums are made, each after one barrier.

        As many barriers alone are counted before, and taken off: a sum's time does not cover its barrier either.
        """
        if not self.exists:
            yield
            return
        transport.barrier()
        first = interface_bytes()
        for _ in range(num_sums):
            transport.barrier()
        transport.barrier()  # a backend returns before the kernel has sent everything
        second = interface_bytes()
        self.forwarder_use.start()
        yield
        self.forwarder_use.stop()
        transport.barrier()
        third = interface_bytes()
        self.sent.append((third.sent - 2 * second.sent + first.sent) / num_sums)
        self.received.append((third.received - 2 * second.received + first.received) / num_sums)

    def columns(self, transport: Transport, time_s: float) -> dict[str, float | None]:
        """`wire_bytes_sent`, `of_limit` and `forwarder_cpu_share`, for sums that took `time_s` seconds."""
        if not self.exists:
            return {"wire_bytes_sent": None, "of_limit": None, "forwarder_cpu_share": None}
        sent, received = (sum(counts) / len(counts) for counts in (self.sent, self.received))
        (mean_sent,) = transport.all_reduce_scalars([sent / transport.world_size], "sum")
        least_s = max(
            8 * sent / self.uplink_bps if self.uplink_bps else 0.0,
            8 * received / self.downlink_bps if self.downlink_bps else 0.0,
        )
        (least_s,) = transport.all_reduce_scalars([least_s], "max")
        return {
            "wire_bytes_sent": mean_sent,
            "of_limit": least_s / time_s if least_s else None,
            "forwarder_cpu_share": self.forwarder_use.share,
        }
