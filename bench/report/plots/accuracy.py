"""Draw test accuracy against time, bytes or epochs: the mean, in a band from the lowest seed to the highest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.report.configurations import Configuration, format_value
from bench.report.plots import style
from bench.report.plots.picture import Picture
from bench.report.plots.results import NotDrawable, Results

if TYPE_CHECKING:
    import pandas as pd


def against_time(results: Results) -> Picture:
    """Draw test accuracy against training time, without evaluation and set-up."""
    return _draw(results, "train_time_s", "training time", "train_time_s")


def against_bytes(results: Results) -> Picture:
    """Draw test accuracy against the bytes that a rank has sent, on a logarithmic axis if they differ much."""
    return _draw(results, "bytes_sent", "bytes sent per rank", "payload_bytes_per_step")


def against_epochs(results: Results) -> Picture:
    """Draw test accuracy against epochs."""
    return _draw(results, "epoch", "epochs", "epoch")


def _draw(results: Results, cost: str, what: str, unit_of: str) -> Picture:
    curves = {each.title: _curve(results, each, cost) for each in results.configurations}
    curves = {title: curve for title, curve in curves.items() if len(curve)}
    if not curves:
        raise NotDrawable(
            f"test accuracy against {what} needs a finished run with values in test_accuracy and {unit_of}"
        )
    figure, (axes,) = style.new_figure()
    lines = {}
    looks = results.looks(results.configurations)
    for title, curve in curves.items():
        (lines[title],) = axes.plot(curve["cost"], curve["mean"], **style.line(*looks[title]))
        style.tooltips(
            lines[title],
            *(
                f"{title}: {point.mean:.2%} after {format_value(unit_of, point.cost)}, "
                f"seeds from {point.low:.2%} to {point.high:.2%}"
                for point in curve.itertuples()
            ),
        )
        axes.fill_between(
            curve["cost"], curve["low"], curve["high"], color=style.color(*looks[title]), alpha=0.15, linewidth=0
        )
    axes.set_title(f"Test accuracy against {what}")
    style.name_axis(axes, "x", what, unit_of, log=cost == "bytes_sent")
    style.accuracy_axis(axes)
    style.legend(figure, lines)
    ends = "; ".join(
        f"{title} {curve['mean'].iloc[-1]:.1%} after {format_value(unit_of, curve['cost'].iloc[-1])}"
        for title, curve in curves.items()
    )
    return Picture(figure=figure, alt=f"Curves of test accuracy against {what}. At the end: {ends}.")


def _curve(results: Results, configuration: Configuration, cost: str) -> pd.DataFrame:
    """Return mean cost, and mean, lowest and highest accuracy, at every step at which all seeds were evaluated."""
    known = results.evaluations(configuration).dropna(subset=["test_accuracy", cost])
    steps = known.groupby("step")
    curve = steps.agg(
        cost=(cost, "mean"), mean=("test_accuracy", "mean"), low=("test_accuracy", "min"), high=("test_accuracy", "max")
    )
    return curve[steps["run_id"].nunique() == known["run_id"].nunique()]
