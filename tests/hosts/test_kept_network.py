"""Runs of one command on virtual hosts: they share the process with torch and, with equal hosts, the network."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.core.config.run import RunConfig
from bench.core.run_folder import read_json
from bench.hosts.cluster import Cluster
from bench.hosts.virtual_network import VirtualNetwork
from bench.launch import run
from bench.launch.jobs import fork_server
from bench.launch.jobs.fork_server import TRAIN, ForkServer
from bench.launch.plan import plan
from bench.launch.run import Result
from tests.hosts.conftest import processes_of, wait_for_end_of
from tests.testing.invoke import rows, start
from tests.testing.links import processes_on

SMALL: dict[str, Any] = {
    "model": "linear", "dataset": "synthetic", "train_size": 256, "test_size": 64, "batch_size": 8, "eval_every": 5,
    "hosts": 2, "bandwidth": "100mbit", "threads": 1, "timeout_s": 3.0, "collective": "ring",
}  # fmt: skip


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[VirtualNetwork]:
    """Return a list that gets every network that is built; fail if another one is open then."""
    networks: list[VirtualNetwork] = []

    def build(cluster: Cluster) -> VirtualNetwork:
        assert all(network.poll() is not None for network in networks)
        networks.append(VirtualNetwork(cluster))
        return networks[-1]

    monkeypatch.setattr(fork_server, "VirtualNetwork", build)
    return networks


@pytest.fixture
def server() -> Iterator[ForkServer]:
    with ForkServer(TRAIN) as server:
        yield server


def train(
    server: ForkServer, out: Path, at_first_row: Callable[[], None] = lambda: None, **options: Any
) -> tuple[Result, list[int]]:
    """Run a job; return its result and the ids of the processes that forked its ranks."""
    parents: list[int] = []

    def see(line: dict[str, Any]) -> None:
        if "evaluated" in line and not parents:
            parents.extend({process.ppid() for process in psutil.Process().children(recursive=True)} - {os.getpid()})
            at_first_row()

    config = plan(RunConfig(**{"steps": 10, **SMALL, **options}))
    return run.execute(config, out, see, server), parents


def test_seeds_share_one_network_and_its_measurements(
    built: list[VirtualNetwork], server: ForkServer, tmp_path: Path
) -> None:
    (first, forked), (second, forked_again) = (train(server, tmp_path, seed=seed) for seed in (1, 2))
    assert (first.status, second.status, len(built)) == ("ok", "ok", 1)
    assert forked == forked_again
    assert read_json(first.folder.link) == read_json(second.folder.link)
    for result in (first, second):
        (*_, row) = rows(result.folder.path)
        assert float(row["measured_bandwidth_bps"]) == built[0].report.measured_bandwidth_bps
        assert float(row["wire_bytes_per_step"]) > float(row["payload_bytes_per_step"])
        assert row["wire_headers"] == "exact"


@pytest.mark.long
def test_other_hosts_close_the_network_before_theirs_is_built(
    built: list[VirtualNetwork], server: ForkServer, tmp_path: Path
) -> None:
    results = [train(server, tmp_path, bandwidth=rate) for rate in ("100mbit", "50mbit")]
    assert [result.status for result, _ in results] == ["ok", "ok"]
    assert results[0][1] == results[1][1]
    assert [network.cluster.hosts[0].uplink_bps for network in built] == [100e6, 50e6]


def test_ranks_are_numbered_by_host_and_each_is_on_its_own(
    built: list[VirtualNetwork], server: ForkServer, tmp_path: Path
) -> None:
    found: list[int] = []
    result, _ = train(
        server, tmp_path, lambda: found.extend(len(processes_on(built[0], index)) for index in range(2)),
        ranks_per_host=2, steps=40,
    )  # fmt: skip
    assert (result.status, found) == ("ok", [2, 2])
    assert {path.name for path in result.folder.logs.glob("host-*")} == {"host-0", "host-1"}


def kill_rank(network: VirtualNetwork) -> None:
    processes_on(network, 1)[0].kill()


def kill_fork_server(network: VirtualNetwork) -> None:
    processes_on(network, 0)[0].parent().kill()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("kill", "said"),
    [
        (kill_rank, "rank 1"),
        pytest.param(VirtualNetwork.kill, "the supervisor of the virtual hosts", marks=pytest.mark.long),
        pytest.param(kill_fork_server, "the process that the ranks are forked from", marks=pytest.mark.long),
    ],
)
def test_who_was_killed_is_named_and_the_next_run_has_a_new_network(
    kill: Callable[[VirtualNetwork], None], said: str, built: list[VirtualNetwork], server: ForkServer, tmp_path: Path
) -> None:
    result, forked = train(server, tmp_path, lambda: kill(built[0]), steps=100_000)
    assert result.status == "failed"
    assert result.error.startswith(f"{said} was killed by SIGKILL")
    result, forked_again = train(server, tmp_path)
    assert (result.status, len(built)) == ("ok", 2)
    assert (forked == forked_again) is (kill is not kill_fork_server)


@pytest.mark.long
def test_a_network_that_ended_between_runs_is_built_again(
    built: list[VirtualNetwork], server: ForkServer, tmp_path: Path
) -> None:
    assert train(server, tmp_path)[0].status == "ok"
    built[0].kill()
    built[0].wait()
    assert train(server, tmp_path)[0].status == "ok"
    assert len(built) == 2


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_launcher_that_is_killed_or_stopped_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    process = start(
        "run", "--model", "linear", "--dataset", "synthetic", "--hosts", "2", "--bandwidth", "100mbit", "--steps",
        "100000", "--eval-every", "5", "--out", str(tmp_path / "out"), XDG_STATE_HOME=str(tmp_path),
    )  # fmt: skip
    while not list(tmp_path.glob("out/*/metrics.csv")):
        assert process.poll() is None
        time.sleep(0.02)
    assert len(processes_of(tmp_path)) == 5  # the launcher, the process with torch, the supervisor, two ranks
    process.send_signal(number)
    process.communicate()
    assert process.returncode == code
    wait_for_end_of(tmp_path)


@pytest.mark.long
def test_losses_do_not_depend_on_earlier_runs(
    built: list[VirtualNetwork], server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The forwarder starts every job with the run's seed, also on a kept network."""
    seeds: list[int] = []
    restart = VirtualNetwork.restart
    monkeypatch.setattr(VirtualNetwork, "restart", lambda self, seed: seeds.append(seed) or restart(self, seed))
    for seed in (3, 5):
        assert train(server, tmp_path, seed=seed)[0].status == "ok"
    assert (seeds, len(built)) == ([3, 5], 1)
