"""What joins the ranks that are asked for: their links, and what a message over these was measured to cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.core.counters import FRAME_BYTES, FRAME_HEADER_BYTES
from bench.extensions.predict.calibration import FORWARDED, FRAMES, LOCAL, SEGMENTS, Calibration
from bench.extensions.predict.links.access import Links
from bench.extensions.predict.links.paces import TraceClock
from bench.extensions.predict.request import Asked
from bench.hosts.cluster import Trace, has_real_frames

FRAME_PER_PAYLOAD = FRAME_BYTES / (FRAME_BYTES - FRAME_HEADER_BYTES)
"""bytes of a full Ethernet frame / what TCP carries in it, with timestamps"""
ACK_SHARE = FRAME_HEADER_BYTES / (2 * FRAME_BYTES)
"""of an acknowledgement, a header without payload, for every second frame: RFC 1122, section 4.2.3.2"""
MS_PER_S = 1e3


def links_of(calibration: Calibration, asked: Asked) -> Links:
    """Rates in bytes per second of what TCP carries, so that headers of frames are paid for.

    Raises:
        UsageError: the file of a trace is gone, or another one.
    """
    way = _way(calibration, asked)
    framed, acked = (1.0, 0.0) if way == SEGMENTS else (FRAME_PER_PAYLOAD, ACK_SHARE)
    costs = calibration.messages.get(way, calibration.messages[LOCAL])

    def rates(figures: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.array([math.inf if bps is None else bps / 8 / framed for bps in figures])

    return Links(
        host_of=np.repeat(np.arange(len(asked.hosts)), asked.ranks_per_host),
        up_rate=rates([host.mean_rates[0] for host in asked.hosts]),
        down_rate=rates([host.mean_rates[1] for host in asked.hosts]),
        up_paces=_paces([host.uplink_trace for host in asked.hosts]),
        down_paces=_paces([host.downlink_trace for host in asked.hosts]),
        latency_s=np.array([host.latency_s for host in asked.hosts]),
        ack_share=acked,
        message_s=costs.message_s + calibration.around_message_s,
        per_byte_s=costs.per_byte_s,
        wake_s=costs.wake_s,
        crowded_wake_s=_crowded_wake_s(calibration, asked),
        carry_byte_s=costs.carry_byte_s,
        carriers=1 if way == FORWARDED else asked.shared_cores or 1,  # the forwarder is one thread
    )


def _crowded_wake_s(calibration: Calibration, asked: Asked) -> float:
    """It grows with the threads that have their turn before one that wakes; up to one per core there are none."""
    if asked.shared_cores is None:
        return 0.0
    known = calibration.crowds[-1].load
    return calibration.crowded_wake_s * max(0.0, asked.load(calibration) - 1) / (known - 1) if known > 1 else 0.0


def _way(calibration: Calibration, asked: Asked) -> str:
    """How messages go: as between virtual hosts where those share cores, else over links of frames.

    Virtual hosts have late frames, where that was measured, and those of traces forwarded.
    """
    if asked.shared_cores is None or len(asked.hosts) == 1:
        return LOCAL
    if FORWARDED in calibration.messages and (asked.link_trace or any(host.latency_s for host in asked.hosts)):
        return FORWARDED
    return FRAMES if asked.link_trace or has_real_frames(asked.hosts) else SEGMENTS


def _paces(traces: Sequence[Trace | None]) -> list[TraceClock | None]:
    """Each trace is read once.

    Raises:
        UsageError: a file is gone, or another one.
    """
    read = {trace: TraceClock(np.array(trace.opportunities()) / MS_PER_S) for trace in dict.fromkeys(traces) if trace}
    return [None if trace is None else read[trace] for trace in traces]
