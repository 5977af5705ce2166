"""The report of the links between virtual hosts as measured before training, with warnings."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Literal

from bench.core.counters import WireHeaders
from bench.core.units import format_rate, format_seconds
from bench.hosts.cluster import Cluster


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flow:
    """One connection between two virtual hosts, measured while all hosts sent at the same time.

    Attributes:
        sender, receiver: names of the hosts.
        configured_bps: lower rate of the sender's uplink and the receiver's downlink, in bits per second including
            headers, like all rates here; None: not limited.
        long_bps: rate of the second half of a long message, measured in frames at the interface of the slower link (the
            receiver's if both are equal). On lossy links: rate of a series of datagrams, including lost datagrams.
        short_bps: rate of 100 kB after 0.2 s of silence, from the first byte sent to the last byte received.
        rtt_s: median round trip time of a small message before the links were loaded, in seconds.
        num_sent, num_received: numbers of datagrams sent and received; 0 if the long message went over TCP.
    """

    sender: str
    receiver: str
    configured_bps: float | None
    long_bps: float
    short_bps: float
    rtt_s: float
    num_sent: int = 0
    num_received: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkReport:
    """Measurements of all links, made when the network was built; saved as `link.json` in the folder of every run.

    The ranks copy the `measured_` fields to their rows.

    Attributes:
        measured_bandwidth_bps: `long_bps` of the slowest flow.
        measured_rtt_s: median of the flows' round trip times, in seconds.
        measured_loss_ratio: share of all datagrams that were lost; None if no datagrams were sent, because no host
            loses frames or all flows follow traces.
        wire_headers: "exact" if every packet is one Ethernet frame, so that the interfaces count all headers; otherwise
            "estimated".
        congestion_control: name of TCP's congestion control on all hosts, such as "reno".
        warnings: sentences for the user about rates that are more than 10 % off, and other values that differ from the
            configuration.
        flows: every measured connection.
    """

    measured_bandwidth_bps: float
    measured_rtt_s: float
    measured_loss_ratio: float | None
    wire_headers: WireHeaders
    congestion_control: str
    warnings: tuple[str, ...]
    flows: tuple[Flow, ...]


SHORT_MESSAGE_BYTES = 100_000
_TOLERANCE = 0.1
_RTT_TOLERANCE_S = 1e-3
# Number of standard deviations that is tolerated: random losses differ more from the expected number in one of 16 000
# cases.
_CHANCE = 4


def link_warnings(cluster: Cluster, flows: Sequence[Flow], alone: Callable[[Flow], Flow]) -> list[str]:
    """Return warnings about links that do not behave as configured, one sentence each.

    Args:
        cluster: the hosts and their links, as configured.
        flows: the connections, measured while all hosts sent at the same time.
        alone: measures one connection again while all other hosts are silent, to find out whether the link is wrong or
            the machine is slow.
    """
    warnings = []
    hosts = {host.name: host for host in cluster.hosts}

    if worst := _furthest_off(flows, "long_bps"):
        flow, configured_bps = worst
        again = alone(flow)
        what = f"{flow.sender} to {flow.receiver} reached {format_rate(flow.long_bps)} of {format_rate(configured_bps)}"
        if _furthest_off([again], "long_bps"):
            what += (
                f" while all hosts sent at once, and {format_rate(again.long_bps)} while the other hosts were silent:"
                " the link differs from its configuration, so the results are for the measured rate"
            )
        else:
            what += (
                f" while all hosts sent at once, and {format_rate(again.long_bps)} while the other hosts were silent:"
                " this machine's processors are the limit; use fewer hosts or a slower link"
            )
        warnings.append(what)

    # TCP's window needs several round trips to open, so with latency or losses a short message is slow in any case.
    if not any(host.impaired for host in cluster.hosts) and (worst := _furthest_off(flows, "short_bps")):
        flow, configured_bps = worst
        # 100 kB take 8 ms at 100 Mbit/s, so one pause of this machine looks like a slow link: measure a second time.
        again = alone(flow)
        if _furthest_off([again], "short_bps"):
            what = "; short messages may look faster or slower than on a real link"
            if cluster.wire_headers == "estimated" and again.short_bps > configured_bps:
                what = ": above 300 Mbit/s, up to 1 ms of traffic passes at once, so short messages look too fast"
            warnings.append(
                f"{flow.sender} to {flow.receiver}: {SHORT_MESSAGE_BYTES // 1000} kB after a silence passed at"
                f" {format_rate(again.short_bps)} instead of the configured {format_rate(configured_bps)}{what}"
            )

    for flow in flows if not cluster.traces else ():  # on a link with a trace, the delay depends on the moment
        ends = hosts[flow.sender], hosts[flow.receiver]
        latency_s, jitter_s = sum(host.latency_s for host in ends), sum(host.jitter_s for host in ends)
        if latency_s and abs(flow.rtt_s - latency_s) > max(_TOLERANCE * latency_s, _RTT_TOLERANCE_S) + jitter_s:
            warnings.append(
                f"{flow.sender} to {flow.receiver} and back took {format_seconds(flow.rtt_s)} where the latencies add"
                f" up to {format_seconds(latency_s)}; the results are for the measured round trip"
            )
            break

    # Check the losses of all hosts together, because the datagrams of one host are too few.
    num_sent = sum(flow.num_sent for flow in flows)
    expected = sum(hosts[flow.sender].loss * flow.num_sent for flow in flows)
    lost = num_sent - sum(flow.num_received for flow in flows)
    if abs(lost - expected) > _TOLERANCE * expected + _CHANCE * math.sqrt(expected):
        warnings.append(
            f"{lost} of {num_sent} datagrams were lost where {expected:.0f} were expected; the results are for"
            f" a loss of {lost / num_sent:.3g}"
        )
    return warnings


def _furthest_off(flows: Sequence[Flow], rate: Literal["long_bps", "short_bps"]) -> tuple[Flow, float] | None:
    """Return (flow whose rate is furthest from the configured rate, configured rate); None if all are within 10 %."""
    limited = [
        (abs(getattr(flow, rate) / flow.configured_bps - 1), flow, flow.configured_bps)
        for flow in flows
        if flow.configured_bps is not None
    ]
    off = [entry for entry in limited if entry[0] > _TOLERANCE]
    return max(off, key=lambda entry: entry[0])[1:] if off else None
