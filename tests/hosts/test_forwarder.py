"""Links by the forwarder have the delay, loss and trace that were set, and the forwarder ends with the job."""

from __future__ import annotations

import dataclasses
import json
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
from tests.testing.invoke import execute

# Another process may take the CPU for the few milliseconds of a measurement; a wrong link stays wrong.
ATTEMPTS = 4


@pytest.fixture(autouse=True)
def _permitted() -> None:
    supported, reason = forwarder_supported() if hosts_supported()[0] else (False, "no virtual hosts")
    if not supported:
        pytest.skip(f"the forwarder does not work here: {reason}")


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


@pytest.mark.timeout(180)
def test_rows_say_which_trace_was_followed_and_what_that_cost(tmp_path: Path) -> None:
    path = tmp_path / "cell.trace"
    path.write_text("".join(f"{moment}\n" for moment in range(1, 101)), encoding="ascii")  # 12.1 Mbit/s
    answer = execute(
        "collectives", "--hosts", "2", "--bandwidth-trace", str(path), "--latency", "2ms", "--sizes", "100kB",
        "--collectives", "ring", "--rounds", "1", "--iters", "5", "--warmup", "1", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert answer.code == 0, answer.error
    (row,) = json.loads(answer.out)
    assert row["link_trace"].startswith("cell.trace (")
    assert row["uplink_bps"] == row["downlink_bps"] == pytest.approx(1514 * 8 * 1000)
    assert (row["latency_s"], row["wire_headers"], row["num_wrong"]) == (0.002, "exact", 0)
    assert 0 < row["forwarder_cpu_share"] < 1
    # Each host sends 100 kB in frames; the trace limits the speed.
    assert row["time_p50_s"] > 100e3 * 8 / row["uplink_bps"]
