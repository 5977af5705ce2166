"""Shaping: the kernel's queue settings that make a virtual link as fast, slow, late and lossy as asked.

Jitter and traces are not among them: `netem` would let delayed packets overtake each other (`bench.hosts.forwarder`).

Source: Linux tc-tbf(8) and tc-netem(8); netem as the child of the rate limiter is Mininet's arrangement (mininet.link).
"""

from __future__ import annotations

import math

from bench.core.interface import FRAME_BYTES
from bench.hosts.cluster import Cluster, HostLink

# What a full queue may hold: below it the link drops, as a switch or a home router does.
_QUEUE_S = 0.2
_MIN_QUEUE_BYTES = 65536
_BURST_S = 1e-3
_NUM_PACKETS_UNLIMITED = 100_000
_MAX_FRAMES_OFFLOADED = 65536 // FRAME_BYTES
"""in one packet, of 64 kB at most"""


def burst_bytes(rate_bps: float, *, real_frames: bool) -> int:
    """How much may pass at once after a silence: max(2 frames, rate x 1 ms), but at most 3 frames if frames are real.

    A bucket too small loses the tokens of a timer that fires late; one too large lets short messages travel free: with
    1 ms (12.5 kB) at 100 Mbit/s, 100 kB after a silence pass 12 % too fast, with 3 frames 4 %. With offload one packet
    alone may be 64 kB, so the cap does not apply.
    """
    burst = max(2 * FRAME_BYTES, math.ceil(rate_bps / 8 * _BURST_S))
    return min(burst, 3 * FRAME_BYTES) if real_frames else burst


def queue_bytes(rate_bps: float) -> int:
    """What may wait for a link of this rate: 200 ms of it, at least 64 kB; more is dropped."""
    return max(_MIN_QUEUE_BYTES, math.ceil(rate_bps / 8 * _QUEUE_S))


def offload_arguments(cluster: Cluster) -> list[str]:
    """Arguments of `ip link set` that make every packet one real frame; none where offload stays on."""
    if cluster.wire_headers == "estimated":
        return []
    return ["gso_max_size", str(FRAME_BYTES), "gso_max_segs", "1"]


def own_offload_arguments(cluster: Cluster, host: HostLink) -> list[str]:
    """The same for a host's own end, whose packets are to pass its rate limiter whole.

    A larger one would be cut into single frames there, each of which costs as much as a whole packet.
    """
    if cluster.wire_headers == "exact" or host.uplink_bps is None:
        return offload_arguments(cluster)
    frames = burst_bytes(host.uplink_bps, real_frames=False) // FRAME_BYTES
    return ["gso_max_segs", str(frames)] if frames < _MAX_FRAMES_OFFLOADED else []


def uplink_rate_commands(device: str, host: HostLink, *, real_frames: bool) -> list[list[str]]:
    """`tc` commands for the rate at which a host sends."""
    return _rate_commands(device, host.uplink_bps, real_frames=real_frames)


def uplink_commands(device: str, host: HostLink, *, real_frames: bool) -> list[list[str]]:
    """`tc` commands for what a host sends: its rate, and below it delay and loss."""
    commands = uplink_rate_commands(device, host, real_frames=real_frames)
    if not host.impaired:
        return commands
    place = ["parent", "1:1", "handle", "10:"] if commands else ["root", "handle", "10:"]
    netem = ["tc", "qdisc", "add", "dev", device, *place, "netem", "limit", str(_num_delayed_packets(host))]
    if host.latency_s:
        netem += ["delay", f"{round(host.latency_s * 1e6)}us"]
    if host.loss:
        netem += ["loss", f"{host.loss * 100:.6f}%"]
    return [*commands, netem]


def downlink_commands(device: str, host: HostLink, *, real_frames: bool) -> list[list[str]]:
    """`tc` commands for what a host receives: only its rate, delay belongs to the sender."""
    return _rate_commands(device, host.downlink_bps, real_frames=real_frames)


def _rate_commands(device: str, rate_bps: float | None, *, real_frames: bool) -> list[list[str]]:
    if rate_bps is None:
        return []
    burst = burst_bytes(rate_bps, real_frames=real_frames)
    queue = queue_bytes(rate_bps) + burst
    tbf = ["tbf", "rate", f"{round(rate_bps)}bit", "burst", str(burst), "limit", str(queue)]
    return [["tc", "qdisc", "add", "dev", device, "root", "handle", "1:", *tbf]]


def _num_delayed_packets(host: HostLink) -> int:
    """Room for the packets under way and a full queue; netem's default of 1000 would silently cap the rate."""
    if host.uplink_bps is None:
        return _NUM_PACKETS_UNLIMITED
    held_s = host.latency_s + _QUEUE_S
    return 100 + math.ceil(host.uplink_bps / 8 * held_s / FRAME_BYTES)
