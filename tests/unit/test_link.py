"""A virtual host's link: what is counted on it, and what share of its time that filled."""

from __future__ import annotations

import dataclasses

import pytest

from bench.core.interface import InterfaceBytes
from bench.launch.cluster import Cluster, HostLink
from bench.launch.collectives import plan
from bench.launch.collectives_request import CollectivesRequest
from bench.train import link
from bench.train.link import Link
from collectives.memory import run_threads
from collectives.transport import Transport


def test_a_rank_knows_its_own_hosts_rates_and_the_slowest() -> None:
    config = plan(CollectivesRequest(hosts=3, ranks_per_host=2, uplink="20mbit", downlink="100mbit"))[0]
    slow = HostLink(name="slow", uplink_bps=5e6)
    uneven = Cluster(hosts=(slow, HostLink(name="b", downlink_bps=7e6)), ranks_per_host=2)
    config = dataclasses.replace(config, world_size=4, cluster=dataclasses.asdict(uneven))
    own = Link.of(config, rank=3)
    assert (own.uplink_bps, own.downlink_bps, own.slowest) == (None, 7e6, (5e6, 7e6))
    assert not Link.of(dataclasses.replace(config, cluster=None), rank=0).exists


def test_the_busiest_link_sets_the_limit() -> None:
    """Rank 1 receives 3 MB at 8 Mbit/s: 3 s at least, of the 4 s that the sum took."""

    def columns(transport: Transport) -> dict[str, float | None]:
        own = Link(exists=True, uplink_bps=8e6, downlink_bps=8e6, slowest=(8e6, 8e6))
        own.sent, own.received = ([1e6, 3e6], [1e6, 1e6]) if transport.rank == 0 else ([1e6, 1e6], [2e6, 4e6])
        return own.columns(transport, 4.0)

    expected = {"uplink_bps": 8e6, "downlink_bps": 8e6, "wire_bytes_sent": 1.5e6, "of_limit": 0.75}
    assert run_threads(columns, 2) == [expected, expected]


def test_frames_are_counted_per_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([InterfaceBytes(100, 200), InterfaceBytes(700, 500)])
    monkeypatch.setattr(link, "interface_bytes", lambda: next(readings))

    def count(transport: Transport) -> tuple[list[float], list[float]]:
        own = Link(exists=True)
        with own.counting(transport, num_sums=3):
            pass
        return own.sent, own.received

    assert run_threads(count, 1) == [([200.0], [100.0])]
