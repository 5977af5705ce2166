"""Links have their set rates, for long messages and after a silence; uneven links; a lost link; slow CPUs."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.link_report import NetworkReport
from bench.hosts.virtual_network import VirtualNetwork
from tests.testing.links import in_supervisor, set_link

# Another process may take the CPU for the few milliseconds of a measurement; a wrong rate stays wrong.
ATTEMPTS = 4


def link(rate_bps: float, name: str = "any") -> HostLink:
    return HostLink(name=name, uplink_bps=rate_bps, downlink_bps=rate_bps)


def measure(cluster: Cluster, holds: Callable[[NetworkReport], bool] = lambda _: True) -> NetworkReport:
    """Return the measurements of a network; fail if these never hold."""
    for _ in range(ATTEMPTS):
        with VirtualNetwork(cluster) as network:
            report = network.report
        if holds(report):
            return report
    pytest.fail(f"not what was asked: {report}")


@pytest.mark.parametrize("rate_bps", [10e6, 100e6])
def test_the_set_rate_is_reached_within_5_percent_by_long_messages_and_after_a_silence(rate_bps: float) -> None:
    def holds(report: NetworkReport) -> bool:
        flow = report.flows[0]
        return all(0.95 <= reached / rate_bps <= 1.05 for reached in (flow.long_bps, flow.short_bps))

    measure(Cluster.uniform(2, link=link(rate_bps)), holds)


def test_each_direction_has_its_own_rate() -> None:
    hosts = (
        HostLink(name="a", uplink_bps=100e6, downlink_bps=100e6),
        HostLink(name="b", uplink_bps=60e6, downlink_bps=20e6),
    )
    wanted = [pytest.approx(20e6, rel=0.1), pytest.approx(60e6, rel=0.1)]
    report = measure(Cluster(hosts=hosts), lambda report: [flow.long_bps for flow in report.flows] == wanted)
    assert [(flow.sender, flow.configured_bps) for flow in report.flows] == [("a", 20e6), ("b", 60e6)]


@pytest.mark.skipif(not Path("/proc/sys/net/bridge").exists(), reason="this kernel has no filters on bridges")
def test_no_packet_filter_looks_at_the_frames_on_the_switch() -> None:
    setting = "/proc/sys/net/bridge/bridge-nf-call-iptables"
    before = Path(setting).read_text(encoding="ascii")
    with VirtualNetwork(Cluster.uniform(2, link=link(100e6))) as network:
        assert in_supervisor(network, ["cat", setting]).strip() == "0"
    assert Path(setting).read_text(encoding="ascii") == before


def test_an_uneven_cluster_is_measured_both_ways_round() -> None:
    cluster = Cluster(hosts=(link(50e6, "a"), link(50e6, "b"), link(5e6, "edge")))
    report = measure(cluster)
    assert {(flow.sender, flow.receiver): flow.configured_bps for flow in report.flows} == {
        ("a", "b"): 50e6,
        ("b", "edge"): 5e6,
        ("edge", "a"): 5e6,
        ("a", "edge"): 5e6,
        ("b", "a"): 50e6,
        ("edge", "b"): 5e6,
    }
    # A busy machine can starve one flow for a while; a wrong limit shows in all of them.
    slow = [flow.long_bps for flow in report.flows if flow.configured_bps == 5e6]
    assert max(slow) == pytest.approx(5e6, rel=0.05)
    assert report.measured_bandwidth_bps == min(flow.long_bps for flow in report.flows)


def test_every_host_has_the_one_congestion_control_and_the_report_says_so() -> None:
    show = ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
    with VirtualNetwork(Cluster.uniform(2, link=link(100e6))) as network:
        hosts = [network.start(index, show, stdout=subprocess.PIPE, text=True) for index in range(2)]
        assert [host.communicate()[0].strip() for host in hosts] == ["reno", "reno"]
    assert network.report.congestion_control == "reno"
    assert not any("congestion" in warning for warning in network.report.warnings)


PINGS = """
import socket, sys
log = open(sys.argv[1], "a", buffering=1)
ping = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
ping.settimeout(0.2)
while True:
    try:
        ping.sendto(b".", ("10.77.0.2", 7000))
        ping.recv(1)
        log.write("answered\\n")
    except OSError:
        log.write("lost\\n")
"""
ANSWERS = """
import contextlib, socket
echo = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
echo.bind(("10.77.0.2", 7000))
while True:
    asker = echo.recvfrom(1)[1]
    with contextlib.suppress(OSError):  # the link may have gone down meanwhile
        echo.sendto(b".", asker)
"""


def test_a_link_goes_down_and_comes_back(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    cluster = Cluster.uniform(2, link=link(10e6))
    scripts = ([sys.executable, "-c", PINGS, str(log)], [sys.executable, "-c", ANSWERS])
    with VirtualNetwork(cluster) as network:
        hosts = [network.start(index, script) for index, script in enumerate(scripts)]
        wait_for(log, "answered")
        set_link(network, 1, up=False)
        wait_for(log, "lost")
        wait_for(log, "lost")
        assert set(log.read_text(encoding="ascii").split()[-2:]) == {"lost"}
        set_link(network, 1, up=True)
        wait_for(log, "answered")
        for host in hosts:
            host.kill()
            host.wait()


def wait_for(log: Path, word: str) -> None:
    """Wait until the log has one more line with this word."""
    seen = len(log.read_text(encoding="ascii").split())
    while word not in log.read_text(encoding="ascii").split()[seen:]:
        time.sleep(0.05)


SPIN = """
import sys, time
began = time.monotonic()
while time.monotonic() - began < 2:
    pass
"""


def test_a_slow_host_is_stopped_now_and_then_and_no_other() -> None:
    cluster = Cluster(hosts=(HostLink(name="slow", cpu_share=0.2), HostLink(name="free")))
    with VirtualNetwork(cluster) as network:
        hosts = [network.start(index, [sys.executable, "-c", SPIN]) for index in range(2)]
        states = ["", ""]
        while None in [host.poll() for host in hosts]:
            for index, host in enumerate(hosts):
                with contextlib.suppress(OSError):  # the process has ended
                    states[index] += Path(f"/proc/{host.pid}/stat").read_text(encoding="ascii").rpartition(") ")[2][0]
        assert [host.returncode for host in hosts] == [0, 0]
    slow, free = states  # other work on the CPUs makes a process wait, but does not stop it
    assert set("RT") <= set(slow)
    assert "R" in free
    assert "T" not in free
