"""Link warnings: none within 10 %, otherwise the likely cause; the measurements are artificial."""

from __future__ import annotations

import dataclasses

import pytest

from bench.hosts.cluster import Cluster, HostLink, Trace
from bench.hosts.link_report import Flow, link_warnings

ASKED = 100e6


def cluster(rate_bps: float = ASKED, latency_s: float = 0.0) -> Cluster:
    link = HostLink(name="any", uplink_bps=rate_bps, downlink_bps=rate_bps, latency_s=latency_s)
    return Cluster.uniform(2, link=link)


def flow(*, long: float = 1.0, short: float = 1.0, asked: float | None = ASKED, rtt_s: float = 1e-4) -> Flow:
    rate = asked or ASKED
    return Flow(
        sender="host0",
        receiver="host1",
        configured_bps=asked,
        long_bps=long * rate,
        short_bps=short * rate,
        rtt_s=rtt_s,
    )


def refuse(measured: Flow) -> Flow:
    raise AssertionError(f"{measured} must not be measured again")


@pytest.mark.parametrize("off", [0.0, 0.09, 0.11])
@pytest.mark.parametrize(("of_long", "of_short"), [(1, -1), (-1, 1), (1, 0), (0, 1), (-1, 0), (0, -1)])
def test_a_flow_is_warned_of_beyond_ten_percent(off: float, of_long: int, of_short: int) -> None:
    measured = flow(long=1 + of_long * off, short=1 + of_short * off)
    if off < 0.1:
        assert link_warnings(cluster(), [measured], refuse) == []
    else:
        assert link_warnings(cluster(), [measured], lambda measured: measured)
    assert link_warnings(Cluster.uniform(2), [flow(long=0.1, short=9.0, asked=None)], refuse) == []  # no limit


def test_a_slow_machine_is_told_from_a_slow_link() -> None:
    flows = [flow(long=0.95), flow(long=0.7)]
    (busy,) = link_warnings(cluster(), flows, lambda measured: dataclasses.replace(measured, long_bps=0.99 * ASKED))
    assert busy.startswith("host0 to host1 reached 70 Mbit/s of 100 Mbit/s while all hosts sent at once, and 99 Mbit/s")
    assert "processors are the limit" in busy
    (wrong,) = link_warnings(cluster(), flows, lambda measured: measured)
    assert "and 70 Mbit/s while the other hosts were silent" in wrong


def test_one_pause_of_the_machine_is_no_warning_about_short_messages() -> None:
    assert link_warnings(cluster(), [flow(short=0.5)], lambda measured: flow()) == []
    (slow,) = link_warnings(cluster(), [flow(short=0.5)], lambda measured: measured)
    assert "100 kB after a silence passed at 50 Mbit/s instead of the configured 100 Mbit/s" in slow


def test_above_300_mbit_the_burst_is_named() -> None:
    fast = flow(asked=1e9, short=3.0)
    (warning,) = link_warnings(cluster(1e9), [fast], lambda measured: measured)
    assert "up to 1 ms of traffic passes at once" in warning


def test_latency_is_checked_and_short_messages_then_are_not() -> None:
    late = cluster(latency_s=0.01)
    assert link_warnings(late, [flow(short=0.1, rtt_s=0.021)], refuse) == []
    (warning,) = link_warnings(late, [flow(short=0.1, rtt_s=0.03)], refuse)
    assert warning.startswith("host0 to host1 and back took 30 ms where the latencies add up to 20 ms")


def test_jitter_moves_the_round_trip_and_a_trace_makes_it_wait() -> None:
    slow = flow(rtt_s=0.015)
    shaky = HostLink(name="any", uplink_bps=ASKED, downlink_bps=ASKED, latency_s=0.005, jitter_s=0.003)
    assert link_warnings(Cluster.uniform(2, link=shaky), [slow], refuse) == []
    assert len(link_warnings(Cluster.uniform(2, link=dataclasses.replace(shaky, jitter_s=0.001)), [slow], refuse)) == 1
    trace = Trace(path="/cell", digest="0" * 10, mean_bps=ASKED)
    traced = HostLink(name="any", downlink_trace=trace, latency_s=0.005)
    assert link_warnings(Cluster.uniform(2, link=traced), [flow(asked=None, rtt_s=0.1)], refuse) == []


@pytest.mark.parametrize(("num_received", "warned"), [(7920, False), (7880, False), (7840, True), (8000, True)])
def test_losses_are_held_against_what_was_asked_and_chance(num_received: int, warned: bool) -> None:
    lossy = Cluster.uniform(2, link=HostLink(name="any", loss=0.01))
    flows = [dataclasses.replace(flow(asked=None), num_sent=8000, num_received=num_received)]
    warnings = link_warnings(lossy, flows, refuse)
    assert len(warnings) == warned
    assert all("of 8000 datagrams were lost where 80 were expected" in warning for warning in warnings)
