"""A host's link goes down, or its rank is killed, during a run; the other ranks are not notified."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.core.config.run import RunConfig
from bench.core.run_folder import RunFolder, read_json
from bench.hosts.virtual_network import VirtualNetwork
from bench.launch import run
from bench.launch.jobs import torchrun
from bench.launch.jobs.fork_server import TRAIN, ForkedJob, ForkServer
from bench.launch.plan import plan
from bench.launch.run import Result
from tests.testing.invoke import rows
from tests.testing.links import processes_on, set_link

NUM_HOSTS = 4


def run_and_disturb(
    disturb: Callable[[VirtualNetwork], None],
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_hosts: int = NUM_HOSTS,
    timeout_s: float = 3.0,
    ends_if: Callable[[RunFolder], bool] = lambda _: False,
    **options: Any,
) -> Result:
    """Train on virtual hosts and disturb them at the second evaluation; interrupt the run after one if `ends_if`."""
    jobs: list[ForkedJob] = []
    start = torchrun.launch

    def launch(*arguments: Any) -> Any:
        jobs.append(start(*arguments))  # type: ignore[arg-type]
        return jobs[-1]

    def see(line: dict[str, Any]) -> None:
        if line.get("evaluated", {}).get("step") == 40:
            network = jobs[0].network
            assert network is not None
            disturb(network)
        if "evaluated" in line and ends_if(jobs[0].folder):
            raise KeyboardInterrupt

    monkeypatch.setattr(torchrun, "launch", launch)
    asked = RunConfig(
        model="linear", dataset="synthetic", train_size=512, test_size=64, batch_size=8, steps=100_000, eval_every=20,
        hosts=num_hosts, bandwidth="100mbit", timeout_s=timeout_s, **options,
    )  # fmt: skip
    with ForkServer(TRAIN) as server:
        return run.execute(plan(asked), out, see, server)


def said(result: Result) -> dict[int, tuple[str, int | None]]:
    """Return rank -> (message, lost rank)."""
    reports = [read_json(path) for path in result.folder.errors.iterdir()]
    return {report["rank"]: (report["message"], report["lost_rank"]) for report in reports if report}


@pytest.mark.parametrize(
    ("host", "options"),
    [
        pytest.param(2, {"compressor": "topk", "collective": "ring"}, marks=pytest.mark.long),
        pytest.param(3, {"collective": "native"}, marks=pytest.mark.long),
        pytest.param(0, {"collective": "tree"}, marks=pytest.mark.long),  # this host also has the rendezvous store
    ],
    ids=lambda value: str(value) if isinstance(value, int) else value["collective"],
)
def test_all_others_name_the_lost_host_and_it_knows_itself_cut_off(
    host: int, options: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(network: VirtualNetwork) -> None:
        set_link(network, host, up=False)

    result = run_and_disturb(cut, tmp_path, monkeypatch, **options)
    assert result.status == "failed"
    assert f"lost rank {host}, which does not answer any more" in result.error
    by_rank = said(result)
    assert {rank: lost for rank, (_, lost) in by_rank.items() if rank != host} == dict.fromkeys(
        set(range(NUM_HOSTS)) - {host}, host
    )
    assert f"rank {host} lost all other ranks" in by_rank[host][0]
    kept = rows(result.folder.path)
    assert [row["step"] for row in kept[:2]] == ["20", "40"]
    assert kept[-1]["status"] == "failed"


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.long)])
def test_of_two_hosts_neither_is_blamed(host: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(network: VirtualNetwork) -> None:
        set_link(network, host, up=False)

    result = run_and_disturb(cut, tmp_path, monkeypatch, num_hosts=2, collective="ring")
    split = "cannot reach each other; the link of either may be down"
    assert split in result.error
    assert said(result) == {0: (f"rank 0 and rank 1 {split}", None), 1: (f"rank 1 and rank 0 {split}", None)}


def test_of_two_hosts_the_one_whose_rank_was_killed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill_rank_1(network: VirtualNetwork) -> None:
        (rank_1,) = processes_on(network, 1)
        rank_1.kill()

    result = run_and_disturb(kill_rank_1, tmp_path, monkeypatch, num_hosts=2, collective="ring")
    assert "rank 1 was killed by SIGKILL" in result.error
    assert said(result) == {0: ("rank 0 lost rank 1, which does not answer any more", 1)}


@pytest.mark.long
def test_with_a_quorum_the_others_go_on_and_the_rank_returns_when_its_link_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks: list[VirtualNetwork] = []
    comes_back = threading.Timer(25.0, lambda: set_link(networks[0], 2, up=True))

    def cut(network: VirtualNetwork) -> None:
        networks.append(network)
        set_link(network, 2, up=False)
        comes_back.start()

    def has_returned(folder: RunFolder) -> bool:
        return any(row["ranks_returned"] == "1" for row in rows(folder.path))

    result = run_and_disturb(
        cut,
        tmp_path,
        monkeypatch,
        num_hosts=3,
        timeout_s=10.0,
        ends_if=has_returned,
        strategy="elastic:steps=5,quorum=2,deadline=1",
        collective="ring",
    )
    comes_back.join()
    assert (result.status, result.error) == ("interrupted", "stopped by the user; the rows so far are kept")
    *found, _ = rows(result.folder.path)
    assert {row["replicas_in_sync"] for row in found} == {"true"}
    assert (found[-1]["ranks_lost"], found[-1]["ranks_returned"]) == ("1", "1")
