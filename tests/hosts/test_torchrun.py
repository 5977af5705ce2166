"""torchrun on virtual hosts, started as on real machines, and the bytes that the kernel counts."""

from __future__ import annotations

import json
from pathlib import Path

from bench.core.run_folder import RunFolder
from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.virtual_network import VirtualNetwork
from bench.launch.jobs.torchrun import agent_on_host
from tests.testing.all_reduce import NUM_FLOATS

MODULE = "tests.testing.all_reduce"


def test_agents_meet_ranks_follow_hosts_and_frames_are_counted(tmp_path: Path) -> None:
    link = HostLink(name="any", uplink_bps=50e6, downlink_bps=50e6)
    cluster = Cluster.uniform(2, ranks_per_host=2, link=link)
    folder = RunFolder(tmp_path)
    with VirtualNetwork(cluster) as network:
        commands = [agent_on_host(index, cluster, 1, folder, MODULE) for index in range(2)]
        agents = [network.start(index, *command) for index, command in enumerate(commands)]
        assert [agent.wait() for agent in agents] == [0, 0]
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text(encoding="utf-8")) for rank in range(4)]
    assert [rank["host"] for rank in ranks] == [0, 0, 1, 1]
    assert [rank["sum"] for rank in ranks] == [[10.0, 10.0]] * 4
    # In a ring of ranks 0, 1 | 2, 3 each host's interface carries the bytes of one rank.
    payload = 2 * 3 / 4 * 4 * NUM_FLOATS
    for rank in ranks:
        assert 1.04 <= rank["sent"] / payload <= 1.08
        assert 1.04 <= rank["received"] / payload <= 1.08
        assert rank["seconds"] >= 0.95 * payload * 8 / 50e6
