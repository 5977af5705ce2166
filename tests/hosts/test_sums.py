"""`bench collectives` on virtual hosts: frames counted by the kernel, and the use of the links."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.testing.invoke import decoys, execute

pytest.importorskip("bench.extensions.microbenchmarks")


def test_a_full_link_is_near_its_limit_and_frames_hold_headers(tmp_path: Path) -> None:
    answer = execute(
        "collectives", "--hosts", "2", "--bandwidth", "20mbit", "--sizes", "1MB", "--collectives", "native,ring,server",
        "--rounds", "1", "--iters", "2", "--warmup", "1", "--json", cwd=decoys(tmp_path),
    )  # fmt: skip
    assert answer.code == 0, answer.error
    rows = {row["collective"]: row for row in json.loads(answer.out)}
    for row in rows.values():
        network = {"hosts": 2, "ranks_per_host": 1, "uplink_bps": 20e6, "downlink_bps": 20e6, "latency_s": 0}
        assert {name: row[name] for name in network} == network
        assert (row["wire_headers"], row["num_wrong"]) == ("exact", 0)
        assert 10e6 < row["measured_bandwidth_bps"] < 30e6
        assert row["measured_rtt_s"] > 0
        assert "congestion" not in row["link_warnings"]
        assert 1.03 <= row["wire_bytes_sent"] / row["bytes_sent"] <= 1.10
        assert row["of_limit"] <= 1.05
    assert rows["ring"]["of_limit"] > 0.8
    assert rows["server"]["of_limit"] < 0.8  # up, then down: one direction of the link is always idle


@pytest.mark.long
def test_barriers_between_small_sums_are_not_counted() -> None:
    """Each of four hosts sends 416 bytes to three others, in about 2.4 kB of frames; a barrier adds 1.3 kB."""
    answer = execute(
        "collectives", "--hosts", "4", "--bandwidth", "100mbit", "--sizes", "400", "--collectives", "allgather",
        "--rounds", "1", "--iters", "20", "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.error
    (row,) = json.loads(answer.out)
    assert row["bytes_sent"] == 1248
    assert 1248 + 3 * 66 < row["wire_bytes_sent"] < 3100
