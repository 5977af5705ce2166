"""NetworkReport: what the links between virtual hosts really did, measured before training."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from bench.core.interface import WireHeaders
from bench.core.run_folder import RunFolder, read_json, write_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """One measured connection, from one virtual host to another, while all hosts sent at once.

    Attributes:
        sender, receiver: names of the hosts.
        asked_bps: the lower of the sender's uplink and the receiver's downlink; None where neither is limited.
        long_bps: rate of the second half of a long message: frames through the interface of the slower link, the
            receiver's if both are as slow, over time. Where frames are lost, that of a row of datagrams, those
            included that were lost.
        short_bps: rate of 100 kB after 0.2 s of silence, from the first byte sent to the last one received.
        rtt_s: median round trip time of a small message before the links were loaded.
        num_sent, num_received: datagrams of the row; 0 where there was none.
    """

    sender: str
    receiver: str
    asked_bps: float | None
    long_bps: float
    short_bps: float
    rtt_s: float
    num_sent: int = 0
    num_received: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkReport:
    """Measured before training; written as `link.json` into the run's folder, read by the ranks.

    Attributes:
        measured_bandwidth_bps: the slowest flow's rate for a long message.
        measured_rtt_s: median over the flows.
        measured_loss_ratio: share of all flows' datagrams that were lost; None where none is to be
            lost, or only on links that follow a trace.
        wire_headers: whether the interfaces' counters see real frames.
        congestion_control: of TCP, on all hosts.
        warnings: one sentence for each thing that is more than 10 % off, or otherwise not what was asked.
        flows: every measured connection.
    """

    measured_bandwidth_bps: float
    measured_rtt_s: float
    measured_loss_ratio: float | None
    wire_headers: WireHeaders
    congestion_control: str
    warnings: tuple[str, ...]
    flows: tuple[Flow, ...]

    def write(self, folder: RunFolder) -> None:
        """Write it as the run's `link.json`, where the ranks find the columns of the same names."""
        write_json(folder.link, dataclasses.asdict(self))

    @classmethod
    def read(cls, folder: RunFolder) -> Self | None:
        """What `write` wrote, or None for a run without virtual hosts."""
        values: dict[str, Any] | None = read_json(folder.link)
        if values is None:
            return None
        flows = tuple(Flow(**flow) for flow in values["flows"])
        return cls(**{**values, "flows": flows, "warnings": tuple(values["warnings"])})
