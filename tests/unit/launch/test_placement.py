"""The placement of ranks: the same for every command that starts some, and an error message for impossible ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.core.config.run import RanksConfig, RunConfig
from bench.core.errors import UsageError
from bench.launch import plan as planning
from bench.launch.plan import place, plan

HOSTS: dict[str, Any] = {
    "hosts": 3,
    "ranks_per_host": 2,
    "uplink": "20mbit",
    "latency": "5ms",
    "jitter": "1ms",
    "loss": "1%",
}


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "usable_cores", lambda: 8)


def test_without_virtual_hosts_ranks_share_the_machines() -> None:
    assert place(RanksConfig()) == RanksConfig(world_size=2, hosts=1, ranks_per_host=2, threads=4)
    asked = RanksConfig(world_size=6, nnodes=3)
    assert place(asked) == RanksConfig(world_size=6, nnodes=3, hosts=3, ranks_per_host=2, threads=4)


def test_virtual_hosts_bring_their_ranks_and_links() -> None:
    placed = place(RanksConfig(**HOSTS))
    assert (placed.world_size, placed.hosts, placed.ranks_per_host, placed.threads) == (6, 3, 2, 1)
    assert (placed.uplink_bps, placed.downlink_bps, placed.latency_s) == (20e6, None, 0.005)
    assert (placed.jitter_s, placed.loss_ratio, placed.cpu_share, placed.cluster_digest) == (0.001, 0.01, 1.0, None)
    assert placed.cluster is not None
    assert [host["name"] for host in placed.cluster["hosts"]] == ["host0", "host1", "host2"]


UNEVEN = """
[[host]]
uplink = "20mbit"
latency = "5ms"
[[host]]
uplink = "{uplink}"
latency = "5ms"
cpu_share = {share}
"""


def test_unequal_hosts_are_told_apart_by_the_columns(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    digests = set()
    for uplink, share in (("30mbit", 0.5), ("40mbit", 0.5), ("20mbit", 0.25)):
        file.write_text(UNEVEN.format(uplink=uplink, share=share), encoding="utf-8")
        config = plan(RunConfig(cluster_file=str(file)))
        assert (config.uplink_bps, config.cpu_share) == (20e6, share)
        digests.add((config.cluster_digest, config.digest))
    assert len({links for links, _ in digests}) == len({run for _, run in digests}) == 3


def test_loss_and_jitter_tell_experiments_apart() -> None:
    runs = [plan(RunConfig(hosts=2, latency="5ms", **more)) for more in ({}, {"loss": "1%"}, {"jitter": "1ms"})]
    assert len({run.digest for run in runs}) == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"hosts": 3, "world_size": 4}, "--world-size 4 contradicts 3 virtual hosts"),
        ({"hosts": 3, "device": "cuda"}, "use --device cpu"),
        ({"hosts": 2, "nnodes": 2, "rdzv_endpoint": "a:1"}, "virtual hosts are on one machine"),
        ({"hosts": 2, "node_rank": 1}, "--node-rank 1 does not exist among 1 machines"),
        ({"ranks_per_host": 2}, "give their number with --hosts N"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        plan(RunConfig(**options))
    assert "\n" not in str(caught.value)
