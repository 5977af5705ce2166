"""Grouping and naming of runs for pictures."""

from __future__ import annotations

from pathlib import Path

from bench.report.groups import RunGroup
from bench.report.plots.results import shortly_labelled
from tests.testing.fake_results import fake_run, results


def test_a_legend_says_what_tells_the_series_apart_and_says_it_once() -> None:
    labels = [
        {"compressor": compressor, "collective": "ring", "uplink_bps": link, "downlink_bps": link, "latency_s": latency}
        for compressor, link, latency in (("none", 1e7, 0.0), ("none", 1e8, 0.0), ("topk", 1e8, 0.01))
    ]
    groups = shortly_labelled([RunGroup(label=label, runs=[]) for label in labels])
    assert list(groups[0].label) == ["compressor", "uplink_bps", "latency_s"]
    alone = RunGroup(label=labels[0], runs=[])
    assert shortly_labelled([alone]) == [alone]


def test_runs_of_two_versions_are_one_configuration_of_a_picture(tmp_path: Path) -> None:
    rows = [
        row
        for compressor, ids in (("none", ("d",)), ("topk", ("before", "after")))
        for number, config_id in enumerate(ids)
        for seed in (1, 2)
        for row in fake_run(
            [0.95], compressor=compressor, seed=seed, config_id=config_id, started_at=f"2026-03-0{1 + number}"
        )
    ]
    dense, sparse = results(tmp_path, rows).across("uplink_bps")
    assert len(dense.runs) == len(sparse.runs) == 2
    assert {run["started_at"] for run in sparse.runs} == {"2026-03-02"}
