"""`bench collectives` on virtual hosts: frames counted by the kernel, and how full the links were."""

from __future__ import annotations

import json

import pytest

from tests.cli.invoke import execute


@pytest.mark.timeout(180)
def test_a_full_link_is_near_its_limit_and_frames_hold_headers() -> None:
    answer = execute(
        "collectives", "--hosts", "2", "--bandwidth", "20mbit", "--sizes", "1MB", "--collectives", "native,ring,server",
        "--rounds", "1", "--iters", "2", "--warmup", "1", "--json",
    )  # fmt: skip
    assert answer.code == 0, answer.error
    rows = {row["collective"]: row for row in json.loads(answer.out)}
    for row in rows.values():
        assert (row["uplink_bps"], row["downlink_bps"], row["num_wrong"]) == (20e6, 20e6, 0)
        assert 1.03 <= row["wire_bytes_sent"] / row["bytes_sent"] <= 1.10
        assert row["of_limit"] <= 1.05
    assert rows["ring"]["of_limit"] > 0.8
    assert rows["server"]["of_limit"] < 0.8  # up, then down: half of the link's two directions lies idle
