"""Pictures of runs on a text show bits per byte, of which fewer are better."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.report.page import page
from bench.report.plots.kinds import KINDS
from bench.report.plots.results import NotDrawable, Results
from tests.testing.fake_results import everything, fake_run, fake_text_run, results


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the rows of `everything` on a text; an accuracy of 0.9, the target, becomes 2.2 bits per byte."""
    text = {"dataset": "stdlib", "target_accuracy": None, "target_bits_per_byte": 2.2, "test_accuracy": 0.5}
    rows = [row | {"test_bits_per_byte": 4.0 - 2.0 * row["test_accuracy"]} | text for row in everything()[0]]
    return results(tmp_path_factory.mktemp("text"), rows)


@pytest.mark.parametrize(
    ("name", "x"),
    [("accuracy-time", "training time (s)"), ("accuracy-epochs", "epochs"), ("pareto", "training time (s)")],
)
def test_the_axis_is_in_bits_per_byte(name: str, x: str, full: Results) -> None:
    axes = KINDS[name].draw(full).figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == (x, "test bits per byte")
    low, high = axes.get_ylim()
    assert low < 2.1
    assert high > 2.3


def test_curves_are_means_of_bits_per_byte(tmp_path: Path) -> None:
    shown = results(tmp_path, [*fake_text_run([3.0, 2.2], seed=1), *fake_text_run([2.6, 2.0], seed=2)])
    picture = KINDS["accuracy-time"].draw(shown)
    np.testing.assert_allclose(picture.figure.axes[0].lines[0].get_xydata(), [[2.0, 2.8], [4.0, 2.1]])
    assert picture.alt.startswith("Curves of test bits per byte against training time.")
    assert picture.alt.endswith("2.1 bits per byte after 4 s.")


def test_fewer_bits_are_on_the_front(tmp_path: Path) -> None:
    rows = [
        *fake_text_run([3.0, 2.0], compressor="none"),
        *fake_text_run([3.0, 2.4], compressor="topk"),  # worse, and as slow
        *fake_text_run([3.0, 2.2], compressor="sign", payload_bytes_per_step=10.0),
    ]
    picture = KINDS["pareto"].draw(results(tmp_path, rows))
    assert picture.alt == "Points of bits per byte against time and bytes. On the Pareto front: none; sign."


def test_the_way_to_a_target_is_drawn(full: Results, tmp_path: Path) -> None:
    shown = results(tmp_path, [*fake_text_run([3.0, 2.0, 1.9], seed=1), *fake_text_run([3.0, 2.8, 2.7], seed=2)])
    picture = KINDS["target"].draw(shown)
    assert picture.alt.endswith("1 of 2.")
    assert "Of 8 workloads, none + native is the fastest on 100%" in KINDS["profile"].draw(full).alt
    with pytest.raises(NotDrawable, match="steps to target need a finished run with --target-bits-per-byte"):
        KINDS["target"].draw(results(tmp_path, fake_text_run([3.0, 2.0], target=None)))


def test_lower_is_better_in_the_words_of_a_text(full: Results, tmp_path: Path) -> None:
    assert " Lower and further left is better" in KINDS["accuracy-time"].reading_for(full)
    assert " Higher and further left is better" in KINDS["accuracy-time"].reading_for(
        results(tmp_path, everything()[0])
    )


def test_pictures_of_accuracy_leave_out_texts_and_say_so(tmp_path: Path) -> None:
    images, text = fake_run([0.5, 0.9], model="small_cnn"), fake_text_run([3.0, 2.0], model="gpt")
    mixed = results(tmp_path, [*images, *text])
    (curve,) = KINDS["accuracy-time"].draw(mixed).figure.axes[0].lines
    np.testing.assert_allclose(curve.get_ydata(), [0.5, 0.9])
    assert any(
        caveat.startswith("pictures of accuracy leave out the runs with bits per byte")
        for caveat in page(mixed, [], []).caveats
    )
    assert results(tmp_path, images).left_out == results(tmp_path, text).left_out == []
