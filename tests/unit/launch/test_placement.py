"""Where ranks go: the same for every command that starts some, and what cannot be is one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from bench.core.errors import UsageError
from bench.core.request import HostsRequest, Request
from bench.launch import collectives, placement, plan
from bench.launch.collectives_request import CollectivesRequest
from bench.launch.placement import Placement, place

HOSTS: dict[str, Any] = {"hosts": 3, "ranks_per_host": 2, "uplink": "20mbit", "latency": "5ms"}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "usable_cores", lambda: 8)


def test_without_virtual_hosts_ranks_share_the_machines() -> None:
    assert place(HostsRequest()) == Placement(world_size=2, hosts=1, ranks_per_host=2, threads=4)
    assert place(HostsRequest(world_size=6), 3) == Placement(world_size=6, hosts=3, ranks_per_host=2, threads=4)


def test_virtual_hosts_bring_their_ranks_and_links() -> None:
    placed = place(HostsRequest(**HOSTS))
    assert (placed.world_size, placed.hosts, placed.ranks_per_host, placed.threads) == (6, 3, 2, 1)
    assert (placed.uplink_bps, placed.downlink_bps, placed.latency_s) == (20e6, None, 0.005)
    assert placed.cluster is not None
    assert [host["name"] for host in placed.cluster["hosts"]] == ["host0", "host1", "host2"]


def test_both_commands_place_alike() -> None:
    run = plan.plan(Request(**HOSTS))
    sums, _ = collectives.plan(CollectivesRequest(**HOSTS))
    for name, value in vars(place(HostsRequest(**HOSTS))).items():
        assert getattr(run, name) == getattr(sums, name) == value, name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hosts": 3, "world_size": 4}, "--world-size 4 contradicts 3 virtual hosts"),
        ({"hosts": 3, "device": "cuda"}, "use --device cpu"),
        ({"hosts": 2, "nnodes": 2, "rdzv_endpoint": "a:1"}, "virtual hosts live on one machine"),
        ({"hosts": 2, "node_rank": 1}, "--node-rank 1 does not exist among 1 machines"),
        ({"ranks_per_host": 2}, "say how many with --hosts N"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        plan.plan(Request(**options))
    assert "\n" not in str(caught.value)
