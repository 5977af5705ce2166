"""torchrun on virtual hosts, started as on real machines, and the bytes that the kernel counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench.hosts.cluster import Cluster, HostLink
from bench.hosts.job import start_hosts, torchrun_arguments

NUM_FLOATS = 500_000
SCRIPT = Path(__file__).parents[1] / "testing" / "all_reduce.py"


@pytest.mark.timeout(180)
def test_agents_meet_ranks_follow_hosts_and_frames_are_counted(tmp_path: Path) -> None:
    link = HostLink(name="any", uplink_bps=50e6, downlink_bps=50e6)
    cluster = Cluster.uniform(2, ranks_per_host=2, link=link)

    def command_for(index: int) -> tuple[list[str], dict[str, str]]:
        arguments, variables = torchrun_arguments(index, cluster)
        torchrun = [sys.executable, "-m", "torch.distributed.run", *arguments]
        return [*torchrun, str(SCRIPT), str(tmp_path), str(NUM_FLOATS)], {**variables, "OMP_NUM_THREADS": "1"}

    with (tmp_path / "log").open("wb") as log, start_hosts(cluster, tmp_path, command_for, output=log) as job:
        exit_code = job.wait()
    said = (tmp_path / "log").read_text(encoding="utf-8")
    assert exit_code == 0, said
    assert "hostname of the client socket cannot be retrieved" not in said
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text(encoding="utf-8")) for rank in range(4)]
    assert [rank["host"] for rank in ranks] == [0, 0, 1, 1]
    assert [rank["sum"] for rank in ranks] == [[10.0, 10.0]] * 4
    # In a ring of ranks 0, 1 | 2, 3 each host's interface carries the bytes of one rank.
    payload = 2 * 3 / 4 * 4 * NUM_FLOATS
    for rank in ranks:
        assert 1.04 <= rank["sent"] / payload <= 1.08
        assert 1.04 <= rank["received"] / payload <= 1.08
        assert rank["seconds"] >= 0.95 * payload * 8 / 50e6
