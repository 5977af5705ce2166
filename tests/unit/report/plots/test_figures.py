"""The numbers behind the pictures, against numbers worked by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.report.configurations import Configuration
from bench.report.plots import accuracy, bandwidth, pareto, profile, scaling, step_time, target
from bench.report.plots.results import NotDrawable, shortly_labelled
from tests.testing.fake_results import everything, fake_run, results


def test_a_legend_says_what_tells_the_series_apart_and_says_it_once() -> None:
    labels = [
        {"compressor": compressor, "collective": "ring", "uplink_bps": link, "downlink_bps": link, "latency_s": latency}
        for compressor, link, latency in (("none", 1e7, 0.0), ("none", 1e8, 0.0), ("topk", 1e8, 0.01))
    ]
    groups = shortly_labelled([Configuration(label=label, runs=[]) for label in labels])
    assert list(groups[0].label) == ["compressor", "uplink_bps", "latency_s"]
    alone = Configuration(label=labels[0], runs=[])
    assert shortly_labelled([alone]) == [alone]


def test_a_band_holds_all_seeds(tmp_path: Path) -> None:
    shown = results(tmp_path, [*fake_run([0.5, 0.9], seed=1), *fake_run([0.7, 0.8], seed=2)])
    (axes,) = accuracy.against_epochs(shown).figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[1.0, 0.6], [2.0, 0.85]])
    corners = axes.collections[0].get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.5, 0.9)


def test_a_mean_covers_all_seeds_or_is_not_drawn(tmp_path: Path) -> None:
    shown = results(tmp_path, [*fake_run([0.5, 0.9, 0.95], seed=1, epochs=3), *fake_run([0.7, 0.8], seed=2, epochs=3)])
    (axes,) = accuracy.against_epochs(shown).figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [1.0, 2.0])


def test_bytes_add_up_over_the_steps_between_evaluations(tmp_path: Path) -> None:
    rows = fake_run([0.5, 0.9], payload_bytes_per_step=100.0, state_bytes_per_step=20.0)
    rows[1]["payload_bytes_per_step"] = 50.0
    (axes,) = accuracy.against_bytes(results(tmp_path, rows)).figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [10 * 120.0, 10 * 120.0 + 10 * 70.0])


def test_misses_are_censored() -> None:
    # Kaplan-Meier by hand: at 10 one of four (3/4 left), at 20 one of three (3/4 x 2/3 = 1/2 left), then a miss at 20,
    # at 40 the last one (nothing left).
    reached = target.share_reached([(10.0, True), (20.0, True), (20.0, False), (40.0, True)])
    np.testing.assert_allclose(reached.evaluate([9.0, 10.0, 20.0, 39.0, 40.0]), [1.0, 0.75, 0.5, 0.5, 0.0])


def test_a_miss_counts_until_its_last_step(tmp_path: Path) -> None:
    rows = [*fake_run([0.5, 0.95, 0.96], seed=1), *fake_run([0.5, 0.6, 0.7], seed=2)]
    shown = results(tmp_path, rows)
    (configuration,) = shown.configurations
    assert target.steps_to_target(configuration, 30.0) == [(20.0, True), (30.0, False)]
    picture = target.draw(shown)
    assert "1 of 2" in picture.alt
    curve, mark = picture.figure.axes[0].lines
    np.testing.assert_allclose(curve.get_ydata()[[0, 1, -1]], [0.0, 0.5, 0.5])
    np.testing.assert_allclose(mark.get_xydata(), [[30.0, 0.5]])


def test_a_curve_ends_where_nobody_was_watched_any_more(tmp_path: Path) -> None:
    rows = [*fake_run([0.5, 0.6, 0.7], compressor="topk"), *fake_run([0.5] * 9 + [0.95], compressor="none")]
    curves = {line.get_label(): line for line in target.draw(results(tmp_path, rows)).figure.axes[0].lines}
    ends = sorted(line.get_xdata()[-1] for line in curves.values() if len(line.get_xdata()) > 1)
    assert ends == [30.0, 100.0]


def test_all_seeds_may_miss(tmp_path: Path) -> None:
    picture = target.draw(results(tmp_path, fake_run([0.5, 0.6])))
    np.testing.assert_allclose(picture.figure.axes[0].lines[0].get_ydata(), 0.0)


def test_break_even_lies_on_a_straight_line_between_logarithms() -> None:
    # 4x at 10 Mbit/s, 1/2 at 1000 Mbit/s: logarithms 2 and -1, so two thirds of the way, which is 10 x 100^(2/3).
    assert bandwidth.break_even([(1e7, 4.0), (1e9, 0.5)]) == [pytest.approx(1e7 * 100 ** (2 / 3))]


@pytest.mark.parametrize(
    ("points", "crossings"),
    [([(1e7, 2.0), (1e8, 1.5)], []), ([(1e7, 2.0), (1e8, 1.0), (1e9, 0.5)], [1e8]), ([(1e7, 1.0), (1e8, 3.0)], [1e7])],
)
def test_break_even_points_are_only_those_measured_or_enclosed(
    points: list[tuple[float, float]], crossings: list[float]
) -> None:
    assert bandwidth.break_even(points) == crossings


def test_speed_up_is_over_the_baseline_on_the_same_link(tmp_path: Path) -> None:
    rows, _ = everything()
    two_ranks = [row for row in rows if row["world_size"] == 2]
    picture = bandwidth.draw(results(tmp_path, two_ranks))
    assert "2.00x to 0.50x, 31.6 Mbit/s" in picture.alt
    turned = bandwidth.draw(results(tmp_path, two_ranks, baseline="topk"))
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
    picture = bandwidth.draw(results(tmp_path, rows))
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
    gains = [(rate, effect.value) for rate, effect in bandwidth._gains(dense, sparse)]
    assert [rate for rate, _ in gains] == [1e7, 1e7, 1e8]
    assert [gain for _, gain in gains] == pytest.approx([2.0, 1.0, 1.0])


def test_a_point_is_on_the_front_unless_one_beats_it_in_everything() -> None:
    def point(title: str, accuracy: float, seconds: float, sent: float) -> pareto.Point:
        accuracies, times, numbers = ((value,) * 3 for value in (accuracy, seconds, sent))
        return pareto.Point(title=title, accuracy=accuracies, time=times, bytes=numbers)

    points = [
        point("dense", 0.97, 10.0, 100.0),
        point("fast", 0.95, 5.0, 50.0),
        point("worse than fast", 0.95, 6.0, 50.0),
        point("few bytes", 0.90, 20.0, 1.0),
        point("equal to fast", 0.95, 5.0, 50.0),
    ]
    assert [each.title for each in pareto.pareto_front(points)] == ["dense", "fast", "few bytes", "equal to fast"]


def test_what_a_step_is_made_of_adds_up_to_it(tmp_path: Path) -> None:
    (configuration,) = results(tmp_path, fake_run([0.95], step_time_s=0.05)).configurations
    assert list(step_time.step_parts(configuration).values()) == pytest.approx([0.03, 0.01, 0.05 - 0.04])
    assert list(step_time.exchange_parts(configuration).values()) == pytest.approx([0.002, 0.010])


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


def test_a_hidden_exchange_has_no_bar(tmp_path: Path) -> None:
    (configuration,) = results(tmp_path, fake_run([0.95], encode_s=None, exchange_s=None)).configurations
    assert step_time.exchange_parts(configuration) == {}


def test_scaling_is_within_one_configuration(tmp_path: Path) -> None:
    rows = [row for row in everything()[0] if row["uplink_bps"] == 1e8]
    picture = scaling.draw(results(tmp_path, rows))
    assert picture.alt.count("2.00x from 2 to 4 ranks") == 2


def test_a_profile_counts_a_miss_as_infinitely_slow() -> None:
    times = pd.DataFrame({"a": [10.0, 30.0, math.inf], "b": [20.0, 20.0, math.inf]})
    factors = profile.slow_downs(times)
    np.testing.assert_allclose(factors, [[1.0, 2.0], [1.5, 1.0]])
    half = profile.slow_downs(pd.DataFrame({"a": [10.0], "b": [math.inf]}))
    assert half["b"].tolist() == [math.inf]


def test_a_profile_counts_the_seeds_that_missed(tmp_path: Path) -> None:
    words = profile.draw(results(tmp_path, everything()[0])).alt
    assert (
        "Of 8 workloads, none + native is the fastest on 100%; topk:ratio=0.01 + allgather is the fastest on 50%"
        in words
    )


def test_a_profile_counts_a_seed_that_diverged_as_a_miss(tmp_path: Path) -> None:
    lost = {"status": "failed", "error": "the loss is nan at step 7; training has diverged", "time_to_target_s": None}
    rows = [
        row | (lost if row["compressor"].startswith("topk") and row["uplink_bps"] == 1e7 else {})
        for row in everything()[0]
    ]
    assert "Of 8 workloads, none + native is the fastest on 100%" in profile.draw(results(tmp_path, rows)).alt


def test_a_workload_that_one_method_lacks_is_left_out(tmp_path: Path) -> None:
    rows = [
        row
        for row in everything()[0]
        if not (row["compressor"] == "none" and row["world_size"] == 4 and row["uplink_bps"] == 1e8)
    ]
    assert "Of 6 workloads" in profile.draw(results(tmp_path, rows)).alt


def test_a_seed_that_diverged_counts_as_missed_until_the_last_step_of_all(tmp_path: Path) -> None:
    lost = fake_run([0.5], seed=2, status="failed", error="the loss is nan at step 11; training has diverged")
    shown = results(tmp_path, [*fake_run([0.5, 0.95, 0.96], seed=1), *lost])
    (configuration,) = shown.configurations
    assert target.steps_to_target(configuration, 30.0) == [(20.0, True), (30.0, False)]
    assert "1 of 2" in target.draw(shown).alt
    only = [row | {"compressor": "topk", "run_id": "all of topk", "config_id": "t"} for row in lost]
    assert target.draw(results(tmp_path, [*fake_run([0.5, 0.95]), *only])).alt.endswith("topk, epochs=1 0 of 1.")


def test_bytes_are_not_drawn_where_steps_were_counted_anew(tmp_path: Path) -> None:
    """A run that went on with twice as many ranks has half as many steps."""
    rows = fake_run([0.5, 0.9, 0.95], payload_bytes_per_step=100.0)
    rows[1] |= {"step": 6, "world_size": 4}
    rows[2] |= {"step": 12, "world_size": 4}
    with pytest.raises(NotDrawable, match="needs a finished run"):
        accuracy.against_bytes(results(tmp_path, rows))
