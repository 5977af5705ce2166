"""Curves of accuracy and the Pareto front, against numbers computed by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.report.plots.accuracy import pareto_front
from bench.report.plots.kinds import KINDS
from bench.report.plots.results import NotDrawable
from tests.testing.fake_results import fake_run, results


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
    assert pareto_front(costs) == ["dense", "fast", "few bytes", "equal to fast"]


def test_bytes_are_not_drawn_where_steps_were_counted_anew(tmp_path: Path) -> None:
    """A run that continued with twice as many ranks has half as many steps."""
    rows = fake_run([0.5, 0.9, 0.95], payload_bytes_per_step=100.0)
    rows[1] |= {"step": 6, "world_size": 4}
    rows[2] |= {"step": 12, "world_size": 4}
    with pytest.raises(NotDrawable, match="needs a finished run"):
        KINDS["accuracy-bytes"].draw(results(tmp_path, rows))
