"""A virtual host's link: the counted bytes, and the share of time in which they used it."""

from __future__ import annotations

import dataclasses

import pytest

from bench.core.counters import InterfaceBytes
from bench.extensions.microbenchmarks import collectives_worker
from bench.extensions.microbenchmarks.collectives_worker import LinkCounter
from bench.extensions.microbenchmarks.measurement import check_sums
from bench.extensions.microbenchmarks.options import CollectivesConfig
from bench.hosts.cluster import Cluster, HostLink
from collectives.transport.base import Transport
from tests.testing.memory_transport import run_threads


def test_a_rank_knows_its_own_hosts_rates() -> None:
    config = check_sums(CollectivesConfig(hosts=3, ranks_per_host=2, uplink="20mbit", downlink="100mbit"))[0]
    slow = HostLink(name="slow", uplink_bps=5e6)
    uneven = Cluster(hosts=(slow, HostLink(name="b", downlink_bps=7e6)), ranks_per_host=2)
    config = dataclasses.replace(config, world_size=4, cluster=uneven.to_dict())
    own = LinkCounter.of(config, rank=3)
    assert own is not None
    assert (own.uplink_bps, own.downlink_bps) == (None, 7e6)
    assert LinkCounter.of(dataclasses.replace(config, cluster=None), rank=0) is None


def test_the_busiest_link_sets_the_limit() -> None:
    """Rank 1 receives 3 MB at 8 Mbit/s, which takes at least 3 s of the 4 s of the sum."""

    def columns(transport: Transport) -> dict[str, float | None]:
        own = LinkCounter(uplink_bps=8e6, downlink_bps=8e6)
        own.sent, own.received = ([1e6, 3e6], [1e6, 1e6]) if transport.rank == 0 else ([1e6, 1e6], [2e6, 4e6])
        return own.columns(transport, 4.0)

    assert run_threads(columns, 2) == [{"wire_bytes_sent": 1.5e6, "of_limit": 0.75, "forwarder_cpu_share": None}] * 2


def test_frames_are_counted_per_sum_without_its_barrier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A barrier transfers 7 and 5 bytes here, a sum 100 and 200; only those of the sums are counted."""
    passed = {"sent": 1e6, "received": 2e6}
    monkeypatch.setattr(collectives_worker, "interface_bytes", lambda: InterfaceBytes(**passed))

    def send(sent: int, received: int) -> None:
        passed["sent"] += sent
        passed["received"] += received

    def count(transport: Transport) -> tuple[list[float], list[float]]:
        monkeypatch.setattr(transport, "barrier", lambda: send(7, 5))
        own = LinkCounter()
        with own.counting(transport, num_sums=3):
            for _ in range(3):
                transport.barrier()
                send(100, 200)
        return own.sent, own.received

    assert run_threads(count, 1) == [([100.0], [200.0])]
