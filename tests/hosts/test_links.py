"""Links have their set rates, for long messages and after a silence; uneven links; a lost link; slow CPUs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

import pytest

from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.job import HostsJob, start_hosts
from bench.hosts.link_report import NetworkReport
from tests.testing.links import set_link

# Another process may take the CPU for the few milliseconds of a measurement; a wrong rate stays wrong.
ATTEMPTS = 4


def link(rate_bps: float, name: str = "any") -> HostLink:
    return HostLink(name=name, uplink_bps=rate_bps, downlink_bps=rate_bps)


def measure(cluster: Cluster, run_dir: Path) -> NetworkReport:
    with start_hosts(cluster, run_dir, lambda index: (["true"], {})) as job:
        assert job.wait() == 0
    return job.network


@pytest.mark.parametrize("rate_bps", [10e6, 100e6])
def test_the_set_rate_is_reached_within_5_percent(tmp_path: Path, rate_bps: float) -> None:
    reached: list[tuple[float, float]] = []
    for _ in range(ATTEMPTS):
        flow = measure(Cluster.uniform(2, link=link(rate_bps)), tmp_path).flows[0]
        reached.append((flow.long_bps / rate_bps, flow.short_bps / rate_bps))
        if all(0.95 <= ratio <= 1.05 for ratio in reached[-1]):
            return
    pytest.fail(f"(long message, 100 kB after a silence) over what was asked: {reached}")


def test_each_direction_has_its_own_rate(tmp_path: Path) -> None:
    hosts = (
        HostLink(name="a", uplink_bps=100e6, downlink_bps=100e6),
        HostLink(name="b", uplink_bps=60e6, downlink_bps=20e6),
    )
    for _ in range(ATTEMPTS):
        report = measure(Cluster(hosts=hosts), tmp_path)
        assert [(flow.sender, flow.configured_bps) for flow in report.flows] == [("a", 20e6), ("b", 60e6)]
        if [flow.long_bps for flow in report.flows] == [pytest.approx(20e6, rel=0.1), pytest.approx(60e6, rel=0.1)]:
            return
    pytest.fail(f"rates of both directions are wrong: {report}")


@pytest.mark.skipif(not Path("/proc/sys/net/bridge").exists(), reason="this kernel has no filters on bridges")
def test_no_packet_filter_looks_at_the_frames_on_the_switch(tmp_path: Path) -> None:
    shown = "nsenter --net=/proc/1/ns/net cat /proc/sys/net/bridge/bridge-nf-call-iptables > $0"
    command = ["sh", "-c", shown, str(tmp_path / "shown")]
    before = Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text(encoding="ascii")
    with start_hosts(Cluster.uniform(2, link=link(100e6)), tmp_path, lambda _: (command, {})) as job:
        assert job.wait() == 0
    assert (tmp_path / "shown").read_text(encoding="ascii").strip() == "0"
    assert Path("/proc/sys/net/bridge/bridge-nf-call-iptables").read_text(encoding="ascii") == before


def test_an_uneven_cluster_is_measured_both_ways_round(tmp_path: Path) -> None:
    cluster = Cluster(hosts=(link(50e6, "a"), link(50e6, "b"), link(5e6, "edge")))
    report = measure(cluster, tmp_path)
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


def test_every_host_has_the_one_congestion_control_and_the_report_says_so(tmp_path: Path) -> None:
    shown = "cat /proc/sys/net/ipv4/tcp_congestion_control > $0"
    commands = [["sh", "-c", shown, str(tmp_path / str(index))] for index in range(2)]
    with start_hosts(Cluster.uniform(2, link=link(100e6)), tmp_path, lambda index: (commands[index], {})) as job:
        assert job.wait() == 0
    assert [(tmp_path / str(index)).read_text(encoding="ascii").strip() for index in range(2)] == ["reno", "reno"]
    written = json.loads((tmp_path / "link.json").read_text(encoding="utf-8"))
    assert written["congestion_control"] == job.network.congestion_control == "reno"
    assert not any("congestion" in warning for warning in written["warnings"])


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
    scripts = ([sys.executable, "-c", PINGS, str(log)], [sys.executable, "-c", ANSWERS, str(tmp_path)])
    with start_hosts(cluster, tmp_path, lambda index: (scripts[index], {})) as job:
        wait_for(job, log, "answered")
        set_link(job, 1, up=False)
        wait_for(job, log, "lost")
        wait_for(job, log, "lost")
        assert set(log.read_text(encoding="ascii").split()[-2:]) == {"lost"}
        set_link(job, 1, up=True)
        wait_for(job, log, "answered")


def wait_for(job: HostsJob, log: Path, word: str) -> None:
    """Wait until the log has one more line with this word."""
    seen = len(log.read_text(encoding="ascii").split())
    deadline = time.monotonic() + 10
    while word not in log.read_text(encoding="ascii").split()[seen:]:
        assert time.monotonic() < deadline, f"'{word}' did not come"
        assert job.poll() is None
        time.sleep(0.05)


SPIN = """
import sys, time
began = time.monotonic()
while time.monotonic() - began < 2:
    pass
"""


def processes_with(argument: str) -> list[Path]:
    """Return the folders in /proc of the processes with this last argument."""
    ending = f"\0{argument}\0".encode()
    return [path.parent for path in Path("/proc").glob("[0-9]*/cmdline") if path.read_bytes().endswith(ending)]


def test_a_slow_host_is_stopped_now_and_then_and_no_other(tmp_path: Path) -> None:
    cluster = Cluster(hosts=(HostLink(name="slow", cpu_share=0.2), HostLink(name="free")))
    command = [sys.executable, "-c", SPIN]
    states = {str(tmp_path / name): "" for name in ("slow", "free")}
    with start_hosts(cluster, tmp_path, lambda index: ([*command, list(states)[index]], {})) as job:
        while job.poll() is None:
            for argument in states:
                with contextlib.suppress(OSError):  # the process has ended
                    for folder in processes_with(argument):
                        states[argument] += (folder / "stat").read_text(encoding="ascii").rpartition(") ")[2][0]
        assert job.wait() == 0
    slow, free = states.values()  # other work on the CPUs makes a process wait, but does not stop it
    assert set("RT") <= set(slow)
    assert "R" in free
    assert "T" not in free


LAST_WORDS = """
import pathlib, signal, sys, time
def stop(*_):
    while time.process_time() < 0.5:
        pass
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).touch()
while True:
    time.sleep(0.02)
"""


def test_a_slow_host_that_is_stopped_has_the_whole_grace_for_its_last_words(tmp_path: Path) -> None:
    cluster = Cluster(hosts=(HostLink(name="slow", cpu_share=0.05), HostLink(name="free")))
    scripts = ([sys.executable, "-c", LAST_WORDS, str(tmp_path / "set")], ["true"])
    with start_hosts(cluster, tmp_path, lambda index: (scripts[index], {})) as job:
        while not (tmp_path / "set").exists():
            time.sleep(0.02)
        job.terminate()
        assert job.wait(timeout=8) == 0
