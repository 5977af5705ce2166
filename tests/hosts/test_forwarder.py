"""Links by the forwarder have the delay, loss and trace that were set, and the forwarder ends with the job."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest

from bench.core.errors import UsageError
from bench.hosts.cluster import Cluster, HostLink, Trace
from bench.hosts.job import start_hosts
from bench.hosts.link_report import NetworkReport
from bench.hosts.support import forwarder_supported, hosts_supported
from tests.hosts.conftest import processes_of

# Another process may take the CPU for the few milliseconds of a measurement; a wrong link stays wrong.
ATTEMPTS = 4


def skip_without_forwarder() -> None:
    supported, reason = forwarder_supported() if hosts_supported()[0] else (False, "no virtual hosts")
    if not supported:
        pytest.skip(f"the forwarder does not work here: {reason}")


@pytest.fixture(autouse=True)
def _permitted() -> None:
    skip_without_forwarder()


def forwarded(link: HostLink) -> Cluster:
    return dataclasses.replace(Cluster.uniform(2, link=link), forwarded=True)


def measure(cluster: Cluster, run_dir: Path) -> NetworkReport:
    with start_hosts(cluster, run_dir, lambda index: (["true"], {})) as job:
        assert job.wait() == 0
    return job.network


def test_rate_and_delay_are_those_asked_for_within_5_percent(tmp_path: Path) -> None:
    cluster = forwarded(HostLink(name="any", uplink_bps=10e6, downlink_bps=10e6, latency_s=0.02))
    reached: list[tuple[float, float]] = []
    for _ in range(ATTEMPTS):
        flow = measure(cluster, tmp_path).flows[0]
        reached.append((flow.long_bps / 10e6, flow.rtt_s / 0.04))
        if all(0.95 <= ratio <= 1.05 for ratio in reached[-1]):
            return
    pytest.fail(f"(rate, round trip) over what was asked: {reached}")


def test_as_many_frames_are_lost_as_were_asked_for(tmp_path: Path) -> None:
    report = measure(forwarded(HostLink(name="any", uplink_bps=20e6, downlink_bps=20e6, loss=0.1)), tmp_path)
    # Of 4000 datagrams: four standard deviations are 19 % of 0.1.
    assert report.measured_loss_ratio == pytest.approx(0.1, rel=0.19)
    assert report.wire_headers == "exact"


def test_what_a_trace_drops_is_not_taken_for_loss(tmp_path: Path) -> None:
    path = tmp_path / "fades"
    moments = [1000 * second + moment for second in range(4) for moment in (*range(1, 401), *range(1, 401))]
    path.write_text("".join(f"{moment}\n" for moment in (*sorted(moments), 4000)), encoding="ascii")
    report = measure(Cluster.uniform(2, link=HostLink(name="any", downlink_trace=Trace.of(path), loss=0.01)), tmp_path)
    assert (report.measured_loss_ratio, report.warnings) == (None, ())


def test_with_the_supervisor_killed_nothing_is_left_of_the_forwarder(tmp_path: Path) -> None:
    sleep = (["sh", "-c", "exec sleep 600", str(tmp_path)], {})
    with start_hosts(forwarded(HostLink(name="any", latency_s=0.001)), tmp_path, lambda index: sleep) as job:
        started = f"{sys.executable} -m bench.hosts.supervisor"
        # A child that it has just forked has the same command line.
        supervisor = min(pid for pid, line in processes_of(tmp_path).items() if line.startswith(started))
        os.kill(supervisor, signal.SIGKILL)
        assert job.wait(timeout=10) != 0
        assert str(job.death()).startswith("the supervisor of the virtual hosts was killed by SIGKILL")


def test_a_trace_that_is_gone_when_the_job_starts_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "cell"
    path.write_text("1\n", encoding="ascii")
    cluster = Cluster.uniform(2, link=HostLink(name="any", uplink_trace=Trace.of(path)))
    path.unlink()
    with pytest.raises(UsageError, match=r"the trace .*cell cannot be read: No such file"):
        measure(cluster, tmp_path)
