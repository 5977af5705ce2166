"""Kaplan-Meier curves and performance profiles, against numbers computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd

from bench.report.plots import target
from tests.testing.fake_results import everything, fake_run, results


def test_misses_are_censored() -> None:
    # Kaplan-Meier by hand: at 10 one of four (3/4 left), at 20 one of three (3/4 x 2/3 = 1/2 left), then a miss at 20,
    # at 40 the last one (nothing left).
    reached = target.survival([(10.0, True), (20.0, True), (20.0, False), (40.0, True)])
    np.testing.assert_allclose(reached.evaluate([9.0, 10.0, 20.0, 39.0, 40.0]), [1.0, 0.75, 0.5, 0.5, 0.0])


def test_a_miss_counts_until_its_last_step(tmp_path: Path) -> None:
    rows = [*fake_run([0.5, 0.95, 0.96], seed=1), *fake_run([0.5, 0.6, 0.7], seed=2)]
    shown = results(tmp_path, rows)
    (configuration,) = shown.configurations
    assert target.steps_to_target(configuration, 30.0) == [(20.0, True), (30.0, False)]
    picture = target.draw_kaplan_meier(shown)
    assert "1 of 2" in picture.alt
    curve, mark = picture.figure.axes[0].lines
    np.testing.assert_allclose(curve.get_ydata()[[0, 1, -1]], [0.0, 0.5, 0.5])
    np.testing.assert_allclose(mark.get_xydata(), [[30.0, 0.5]])


def test_a_curve_ends_where_nobody_was_watched_any_more(tmp_path: Path) -> None:
    rows = [*fake_run([0.5, 0.6, 0.7], compressor="topk"), *fake_run([0.5] * 9 + [0.95], compressor="none")]
    curves = {line.get_label(): line for line in target.draw_kaplan_meier(results(tmp_path, rows)).figure.axes[0].lines}
    ends = sorted(line.get_xdata()[-1] for line in curves.values() if len(line.get_xdata()) > 1)
    assert ends == [30.0, 100.0]


def test_all_seeds_may_miss(tmp_path: Path) -> None:
    picture = target.draw_kaplan_meier(results(tmp_path, fake_run([0.5, 0.6])))
    np.testing.assert_allclose(picture.figure.axes[0].lines[0].get_ydata(), 0.0)


def test_a_profile_counts_a_miss_as_infinitely_slow() -> None:
    times = pd.DataFrame({"a": [10.0, 30.0, math.inf], "b": [20.0, 20.0, math.inf]})
    factors = target.slow_downs(times)
    np.testing.assert_allclose(factors, [[1.0, 2.0], [1.5, 1.0]])
    half = target.slow_downs(pd.DataFrame({"a": [10.0], "b": [math.inf]}))
    assert half["b"].tolist() == [math.inf]


def test_a_profile_counts_the_seeds_that_missed(tmp_path: Path) -> None:
    words = target.draw_profile(results(tmp_path, everything()[0])).alt
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
    assert "Of 8 workloads, none + native is the fastest on 100%" in target.draw_profile(results(tmp_path, rows)).alt


def test_a_workload_that_one_method_lacks_is_left_out(tmp_path: Path) -> None:
    rows = [
        row
        for row in everything()[0]
        if not (row["compressor"] == "none" and row["world_size"] == 4 and row["uplink_bps"] == 1e8)
    ]
    assert "Of 6 workloads" in target.draw_profile(results(tmp_path, rows)).alt


def test_a_seed_that_diverged_counts_as_missed_until_the_last_step_of_all(tmp_path: Path) -> None:
    lost = fake_run([0.5], seed=2, status="failed", error="the loss is nan at step 11; training has diverged")
    shown = results(tmp_path, [*fake_run([0.5, 0.95, 0.96], seed=1), *lost])
    (configuration,) = shown.configurations
    assert target.steps_to_target(configuration, 30.0) == [(20.0, True), (30.0, False)]
    assert "1 of 2" in target.draw_kaplan_meier(shown).alt
    only = [row | {"compressor": "topk", "run_id": "all of topk", "config_id": "t"} for row in lost]
    assert target.draw_kaplan_meier(results(tmp_path, [*fake_run([0.5, 0.95]), *only])).alt.endswith(
        "topk, epochs=1 0 of 1."
    )
