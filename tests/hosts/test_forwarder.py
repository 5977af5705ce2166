"""Links by the forwarder have the delay, loss and trace that were set, and the forwarder ends with the job."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster, HostLink, Trace
from bench.hosts.link_report import NetworkReport
from bench.hosts.support import forwarder_supported, hosts_supported
from bench.hosts.virtual_network import VirtualNetwork
from tests.hosts.test_links import measure


def skip_without_forwarder() -> None:
    supported, reason = forwarder_supported() if hosts_supported()[0] else (False, "no virtual hosts")
    if not supported:
        pytest.skip(f"the forwarder does not work here: {reason}")


@pytest.fixture(autouse=True)
def _permitted() -> None:
    skip_without_forwarder()


def forwarded(link: HostLink) -> Cluster:
    return dataclasses.replace(Cluster.uniform(2, link=link), forwarded=True)


def test_rate_and_delay_are_those_asked_for_within_5_percent() -> None:
    def holds(report: NetworkReport) -> bool:
        flow = report.flows[0]
        return all(0.95 <= ratio <= 1.05 for ratio in (flow.long_bps / 10e6, flow.rtt_s / 0.04))

    measure(forwarded(HostLink(name="any", uplink_bps=10e6, downlink_bps=10e6, latency_s=0.02)), holds)


def test_as_many_frames_are_lost_as_were_asked_for() -> None:
    report = measure(forwarded(HostLink(name="any", uplink_bps=20e6, downlink_bps=20e6, loss=0.1)))
    # Of 4000 datagrams: four standard deviations are 19 % of 0.1.
    assert report.measured_loss_ratio == pytest.approx(0.1, rel=0.19)
    assert report.wire_headers == "exact"


def test_what_a_trace_drops_is_not_taken_for_loss(tmp_path: Path) -> None:
    path = tmp_path / "fades"
    moments = [1000 * second + moment for second in range(4) for moment in (*range(1, 401), *range(1, 401))]
    path.write_text("".join(f"{moment}\n" for moment in (*sorted(moments), 4000)), encoding="ascii")
    report = measure(Cluster.uniform(2, link=HostLink(name="any", downlink_trace=Trace.of(path), loss=0.01)))
    assert (report.measured_loss_ratio, report.warnings) == (None, ())


SENDER = """
import socket, sys, time
server = socket.create_server(("10.77.0.2", 7000))
print(flush=True)
connection, _ = server.accept()
time.sleep(0.5)
"""
RECEIVER = "import socket; socket.create_connection(('10.77.0.2', 7000)).recv(1)"


def test_traces_and_losses_start_again_only_when_connections_of_the_earlier_job_are_closed() -> None:
    with VirtualNetwork(forwarded(HostLink(name="any", latency_s=0.02))) as network:
        sender = network.start(1, [sys.executable, "-c", SENDER], stdout=subprocess.PIPE)
        assert sender.stdout is not None
        sender.stdout.readline()
        receiver = network.start(0, [sys.executable, "-c", RECEIVER])
        while not any(" 01 " in line for line in sockets_of(receiver.pid)):  # connected
            time.sleep(0.01)
        network.restart(1)
        states = {line.split()[3] for line in sockets_of(receiver.pid)[1:]} if receiver.poll() is None else set()
        assert "01" not in states
        sender.communicate()
        assert (sender.returncode, receiver.wait()) == (0, 0)


def sockets_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/net/tcp").read_text(encoding="ascii").splitlines()


def test_a_trace_that_is_gone_when_the_job_starts_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "cell"
    path.write_text("1\n", encoding="ascii")
    cluster = Cluster.uniform(2, link=HostLink(name="any", uplink_trace=Trace.of(path)))
    path.unlink()
    with pytest.raises(UsageError, match=r"the trace .*cell cannot be read: No such file"):
        measure(cluster)
