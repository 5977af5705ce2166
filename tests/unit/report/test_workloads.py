from __future__ import annotations

from pathlib import Path

from bench.report.selection import by_workload
from tests.testing.fake_rows import fake_row, stored


def test_methods_on_one_workload_stay_together(tmp_path: Path) -> None:
    rows = [fake_row(), fake_row(compressor="topk"), fake_row(lr=0.1), fake_row(seed=2)]
    (only,) = by_workload(stored(tmp_path, rows))
    assert (only.label, len(only.rows)) == ("", 4)


def test_what_tells_workloads_apart_is_said_once(tmp_path: Path) -> None:
    rows = [
        fake_row(uplink_bps=rate, downlink_bps=rate, model=model, world_size=size, threads=4 // size, seed=seed)
        for seed, (rate, model, size) in enumerate([(1e7, "linear", 2), (1e8, "linear", 2), (None, "linear", 4)])
    ]
    assert [(each.label, len(each.rows)) for each in by_workload(stored(tmp_path, rows))] == [
        ("world_size=2, uplink_bps=10 Mbit/s", 1),
        ("world_size=2, uplink_bps=100 Mbit/s", 1),
        ("world_size=4, uplink_bps=-", 1),
    ]


def test_a_run_is_of_the_workload_that_it_ended_with(tmp_path: Path) -> None:
    rows = [
        fake_row(run_id="a", world_size=2, status="running", step=1),
        fake_row(run_id="a", world_size=4, step=2),
        fake_row(run_id="b", world_size=4, compressor="topk"),
    ]
    (only,) = by_workload(stored(tmp_path, rows))
    assert (only.label, len(only.rows)) == ("", 3)
