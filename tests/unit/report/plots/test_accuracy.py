"""Curves of accuracy, the Pareto front and the way to the target, against numbers computed by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.report.plots import accuracy
from bench.report.plots.kinds import KINDS
from bench.report.plots.results import NotDrawable
from tests.testing.fake_results import everything, fake_run, results


def test_a_band_holds_all_seeds(tmp_path: Path) -> None:
    shown = results(tmp_path, [*fake_run([0.5, 0.9], seed=1), *fake_run([0.7, 0.8], seed=2)])
    (axes,) = KINDS["accuracy-epochs"].draw(shown).figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xydata(), [[1.0, 0.6], [2.0, 0.85]])
    corners = axes.collections[0].get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.5, 0.9)


def test_a_mean_covers_all_seeds_or_is_not_drawn(tmp_path: Path) -> None:
    shown = results(tmp_path, [*fake_run([0.5, 0.9, 0.95], seed=1, epochs=3), *fake_run([0.7, 0.8], seed=2, epochs=3)])
    (axes,) = KINDS["accuracy-epochs"].draw(shown).figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [1.0, 2.0])


def test_bytes_add_up_over_the_steps_between_evaluations(tmp_path: Path) -> None:
    rows = fake_run([0.5, 0.9], payload_bytes_per_step=100.0, state_bytes_per_step=20.0)
    rows[1]["payload_bytes_per_step"] = 50.0
    (axes,) = KINDS["accuracy-bytes"].draw(results(tmp_path, rows)).figure.axes
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [10 * 120.0, 10 * 120.0 + 10 * 70.0])


def test_a_point_is_on_the_front_unless_one_beats_it_in_everything() -> None:
    costs = {
        "dense": (-0.97, 10.0, 100.0),
        "fast": (-0.95, 5.0, 50.0),
        "worse than fast": (-0.95, 6.0, 50.0),
        "few bytes": (-0.90, 20.0, 1.0),
        "equal to fast": (-0.95, 5.0, 50.0),
    }
    assert accuracy.pareto_front(costs) == ["dense", "fast", "few bytes", "equal to fast"]


def test_bytes_are_not_drawn_where_steps_were_counted_anew(tmp_path: Path) -> None:
    """A run that continued with twice as many ranks has half as many steps."""
    rows = fake_run([0.5, 0.9, 0.95], payload_bytes_per_step=100.0)
    rows[1] |= {"step": 6, "world_size": 4}
    rows[2] |= {"step": 12, "world_size": 4}
    with pytest.raises(NotDrawable, match="needs a finished run"):
        KINDS["accuracy-bytes"].draw(results(tmp_path, rows))


def test_misses_are_censored() -> None:
    # Kaplan-Meier by hand: at 10 one of four (3/4 left), at 20 one of three (3/4 x 2/3 = 1/2 left), then a miss at 20,
    # at 40 the last one (nothing left).
    reached = accuracy.survival([(10.0, True), (20.0, True), (20.0, False), (40.0, True)])
    np.testing.assert_allclose(reached.evaluate([9.0, 10.0, 20.0, 39.0, 40.0]), [1.0, 0.75, 0.5, 0.5, 0.0])


def test_a_miss_counts_until_its_last_step(tmp_path: Path) -> None:
    rows = [*fake_run([0.5, 0.95, 0.96], seed=1), *fake_run([0.5, 0.6, 0.7], seed=2)]
    shown = results(tmp_path, rows)
    (configuration,) = shown.configurations
    assert accuracy.steps_to_target(configuration, 30.0) == [(20.0, True), (30.0, False)]
    picture = accuracy.draw_kaplan_meier(shown)
    assert "1 of 2" in picture.alt
    curve, mark = picture.figure.axes[0].lines
    np.testing.assert_allclose(curve.get_ydata()[[0, 1, -1]], [0.0, 0.5, 0.5])
    np.testing.assert_allclose(mark.get_xydata(), [[30.0, 0.5]])


def test_a_curve_ends_where_nobody_was_watched_any_more(tmp_path: Path) -> None:
    rows = [*fake_run([0.5, 0.6, 0.7], compressor="topk"), *fake_run([0.5] * 9 + [0.95], compressor="none")]
    curves = {
        line.get_label(): line for line in accuracy.draw_kaplan_meier(results(tmp_path, rows)).figure.axes[0].lines
    }
    ends = sorted(line.get_xdata()[-1] for line in curves.values() if len(line.get_xdata()) > 1)
    assert ends == [30.0, 100.0]


def test_all_seeds_may_miss(tmp_path: Path) -> None:
    picture = accuracy.draw_kaplan_meier(results(tmp_path, fake_run([0.5, 0.6])))
    np.testing.assert_allclose(picture.figure.axes[0].lines[0].get_ydata(), 0.0)


def test_a_profile_counts_a_miss_as_infinitely_slow() -> None:
    times = pd.DataFrame({"a": [10.0, 30.0, math.inf], "b": [20.0, 20.0, math.inf]})
    factors = accuracy.slow_downs(times)
    np.testing.assert_allclose(factors, [[1.0, 2.0], [1.5, 1.0]])
    half = accuracy.slow_downs(pd.DataFrame({"a": [10.0], "b": [math.inf]}))
    assert half["b"].tolist() == [math.inf]


def test_a_profile_counts_the_seeds_that_missed(tmp_path: Path) -> None:
    words = accuracy.draw_profile(results(tmp_path, everything()[0])).alt
    assert (
        "Of 8 workloads, none + native is the fastest on 100%; topk:ratio=0.01 + allgather is the fastest on 50%"
        in words
    )


def test_a_profile_counts_a_seed_that_diverged_as_a_miss(tmp_path: Path) -> None:
    lost = {
        "status": "failed",
        "error": "the loss is nan at step 7",
        "error_kind": "Diverged",
        "time_to_target_s": None,
    }
    rows = [
        row | (lost if row["compressor"].startswith("topk") and row["uplink_bps"] == 1e7 else {})
        for row in everything()[0]
    ]
    assert "Of 8 workloads, none + native is the fastest on 100%" in accuracy.draw_profile(results(tmp_path, rows)).alt


def test_a_workload_that_one_method_lacks_is_left_out(tmp_path: Path) -> None:
    rows = [
        row
        for row in everything()[0]
        if not (row["compressor"] == "none" and row["world_size"] == 4 and row["uplink_bps"] == 1e8)
    ]
    assert "Of 6 workloads" in accuracy.draw_profile(results(tmp_path, rows)).alt


def test_a_seed_that_diverged_counts_as_missed_until_the_last_step_of_all(tmp_path: Path) -> None:
    lost = fake_run([0.5], seed=2, status="failed", error="the loss is nan at step 11", error_kind="Diverged")
    shown = results(tmp_path, [*fake_run([0.5, 0.95, 0.96], seed=1), *lost])
    (configuration,) = shown.configurations
    assert accuracy.steps_to_target(configuration, 30.0) == [(20.0, True), (30.0, False)]
    assert "1 of 2" in accuracy.draw_kaplan_meier(shown).alt
    only = [row | {"compressor": "topk", "run_id": "all of topk", "config_id": "t"} for row in lost]
    assert accuracy.draw_kaplan_meier(results(tmp_path, [*fake_run([0.5, 0.95]), *only])).alt.endswith(
        "topk, epochs=1 0 of 1."
    )
