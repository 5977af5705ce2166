"""Rows of `bench collectives` on links whose rate follows a trace, and a file that cannot be written."""

import json
import os
from pathlib import Path

import pytest

from tests.hosts.test_forwarder import skip_without_forwarder
from tests.testing.invoke import execute, invoke


def test_rows_say_which_trace_was_followed_and_what_that_cost(tmp_path: Path) -> None:
    skip_without_forwarder()
    path = tmp_path / "cell.trace"
    path.write_text("".join(f"{moment}\n" for moment in range(1, 101)), encoding="ascii")  # 12.1 Mbit/s
    answer = execute(
        "collectives", "--hosts", "2", "--bandwidth-trace", str(path), "--latency", "2ms", "--sizes", "100kB",
        "--collectives", "ring", "--rounds", "1", "--iters", "5", "--warmup", "1", "--json", cwd=tmp_path,
    )  # fmt: skip
    assert answer.code == 0, answer.error
    (row,) = json.loads(answer.out)
    assert row["link_trace"].startswith("cell.trace (")
    assert row["uplink_bps"] == row["downlink_bps"] == pytest.approx(1514 * 8 * 1000)
    assert (row["latency_s"], row["wire_headers"], row["num_wrong"]) == (0.002, "exact", 0)
    assert 0 < row["forwarder_cpu_share"] < 1
    # Each host sends 100 kB in frames; the trace limits the speed.
    assert row["time_p50_s"] > 100e3 * 8 / row["uplink_bps"]


def test_rows_are_not_written_to_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    answer = invoke("collectives", "--sizes", "1kB", "--out", str(tmp_path / "pipe"))
    assert answer.code == 2
    assert "cannot write" in answer.error
