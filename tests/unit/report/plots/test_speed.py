"""Speed over links and ranks, and the parts of a step, against numbers computed by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.report.plots import speed
from tests.testing.fake_results import everything, fake_run, results


def test_speed_up_is_over_the_baseline_on_the_same_link(tmp_path: Path) -> None:
    rows, _ = everything()
    two_ranks = [row for row in rows if row["world_size"] == 2]
    picture = speed.draw_over_bandwidth(results(tmp_path, two_ranks))
    assert "2.00x to 0.50x, 31.6 Mbit/s" in picture.alt
    turned = speed.draw_over_bandwidth(results(tmp_path, two_ranks, baseline="topk"))
    assert "0.50x to 2.00x, 31.6 Mbit/s" in turned.alt


def test_speed_up_is_over_the_baseline_of_the_same_workload(tmp_path: Path) -> None:
    rows = [
        row
        for ranks, factor in ((2, 1.0), (8, 4.0))
        for compressor, gain in (("none", 1.0), ("topk", 1.5))
        for link in (1e7, 1e8)
        for row in fake_run(
            [0.95],
            compressor=compressor,
            world_size=ranks,
            uplink_bps=link,
            downlink_bps=link,
            samples_per_s=100.0 * factor * gain,
            config_id=f"{compressor}{ranks}{link}",
        )
    ]
    picture = speed.draw_over_bandwidth(results(tmp_path, rows))
    assert picture.alt.count("1.50x to 1.50x") == 2
    assert "none" not in picture.alt


def test_links_that_differ_one_way_only_are_points_of_their_own(tmp_path: Path) -> None:
    rows = [
        row
        for compressor, factor in (("none", 1.0), ("topk", 2.0))
        for uplink, downlink in ((1e7, 1e7), (1e7, 1e8), (1e8, 1e8))
        for row in fake_run(
            [0.95],
            compressor=compressor,
            uplink_bps=uplink,
            downlink_bps=downlink,
            samples_per_s=100.0 * (factor if downlink == 1e7 else 1.0),
            config_id=f"{compressor}{uplink}{downlink}",
        )
    ]
    dense, sparse = results(tmp_path, rows).across("uplink_bps", "downlink_bps")
    gains = [(rate, effect.value) for rate, effect in speed._gains(dense, sparse)]
    assert [rate for rate, _ in gains] == [1e7, 1e7, 1e8]
    assert [gain for _, gain in gains] == pytest.approx([2.0, 1.0, 1.0])


def test_scaling_is_within_one_configuration(tmp_path: Path) -> None:
    rows = [row for row in everything()[0] if row["uplink_bps"] == 1e8]
    picture = speed.draw_over_ranks(results(tmp_path, rows))
    assert picture.alt.count("2.00x from 2 to 4 ranks") == 2


def test_what_a_step_is_made_of_adds_up_to_it(tmp_path: Path) -> None:
    (configuration,) = results(tmp_path, fake_run([0.95], step_time_s=0.05)).configurations
    assert list(speed.parts_of_step(configuration).values()) == pytest.approx([0.03, 0.01, 0.05 - 0.04, 0.002, 0.010])


def test_a_hidden_exchange_has_no_bar(tmp_path: Path) -> None:
    (configuration,) = results(tmp_path, fake_run([0.95], encode_s=None, exchange_s=None)).configurations
    assert list(speed.parts_of_step(configuration)) == [
        "forward and backward",
        "exposed exchange",
        "optimizer and rest",
    ]
