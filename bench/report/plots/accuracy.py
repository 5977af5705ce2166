"""Draw test accuracy against what it costs: as curves over the training, and at its end with the Pareto front."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.report.columns import format_value
from bench.report.groups import RunGroup
from bench.report.plots import style
from bench.report.plots.results import NotDrawable, Results

if TYPE_CHECKING:
    import pandas as pd


def draw_curves(results: Results, cost: str, what: str, unit_of: str) -> style.Picture:
    """Draw the mean test accuracy against a cost, in a band from the lowest seed to the highest.

    Args:
        results: the runs.
        cost: ``train_time_s``, ``epoch``, or ``bytes_sent``, whose axis is logarithmic if the values differ much.
        what: the cost in words.
        unit_of: the column of metrics.csv that has the unit of the cost, and must be known.
    """
    curves = results.drawable(
        results.configurations,
        lambda group: _curve(results, group, cost),
        f"test accuracy against {what} needs a finished run with values in test_accuracy and {unit_of}",
    )
    figure, (axes,) = style.new_figure()
    lines, ends = {}, []
    for title, look, curve in curves:
        (lines[title],) = axes.plot(curve["cost"], curve["mean"], **style.line(*look))
        style.tooltips(
            lines[title],
            *(
                f"{title}: {point.mean:.2%} after {format_value(unit_of, point.cost)}, "
                f"seeds from {point.low:.2%} to {point.high:.2%}"
                for point in curve.itertuples()
            ),
        )
        axes.fill_between(curve["cost"], curve["low"], curve["high"], color=style.color(*look), alpha=0.15, linewidth=0)
        ends.append(f"{title} {curve['mean'].iloc[-1]:.1%} after {format_value(unit_of, curve['cost'].iloc[-1])}")
    axes.set_title(f"Test accuracy against {what}")
    style.name_axis(axes, "x", what, unit_of, log=cost == "bytes_sent")
    style.accuracy_axis(axes)
    return style.with_legend(figure, lines, f"Curves of test accuracy against {what}. At the end: {'; '.join(ends)}.")


def _curve(results: Results, group: RunGroup, cost: str) -> pd.DataFrame:
    """Return mean cost, and mean, lowest and highest accuracy, at every step at which all seeds were evaluated."""
    known = results.evaluations(group).dropna(subset=["test_accuracy", cost])
    steps = known.groupby("step")
    curve = steps.agg(
        cost=(cost, "mean"), mean=("test_accuracy", "mean"), low=("test_accuracy", "min"), high=("test_accuracy", "max")
    )
    return curve[steps["run_id"].nunique() == known["run_id"].nunique()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndPoint:
    """Mean, lowest and highest value over seeds of the three quantities of a configuration at the end of training."""

    title: str
    accuracy: tuple[float, float, float]
    time: tuple[float, float, float]
    bytes: tuple[float, float, float]

    def beats(self, other: EndPoint) -> bool:
        """Return True if this point is at least as good in all three quantities and better in one."""
        ours = (-self.accuracy[0], self.time[0], self.bytes[0])
        theirs = (-other.accuracy[0], other.time[0], other.bytes[0])
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def draw_pareto(results: Results) -> style.Picture:
    """Draw accuracy against time and against bytes; filled markers are on the Pareto front of all three."""
    points = [point for each in results.configurations if (point := _end_point(results, each))]
    if len(points) < 2:
        raise NotDrawable(
            "the Pareto front needs two configurations with values in test_accuracy, train_time_s and "
            "payload_bytes_per_step"
        )
    front = pareto_front(points)
    figure, panels = style.new_figure(columns=2, sharey=True)
    drawn = {}
    looks = results.looks(results.configurations)
    for axes, name, what, column in (
        (panels[0], "time", "training time", "train_time_s"),
        (panels[1], "bytes", "bytes sent per rank", "payload_bytes_per_step"),
    ):
        for point in points:
            look, x, y = looks[point.title], getattr(point, name), point.accuracy
            drawn[point.title] = axes.errorbar(
                x[0],
                y[0],
                xerr=style.whiskers([x]),
                yerr=style.whiskers([y]),
                **style.marker(*look),
                markerfacecolor=style.color(*look) if point in front else "white",
                markersize=7,
                linestyle="",
                elinewidth=0.8,
            )
            style.tooltips(
                drawn[point.title].lines[0], f"{point.title}: {y[0]:.2%}, {what} {format_value(column, x[0])}"
            )
        style.name_axis(axes, "x", what, column, log=True)
    panels[0].set_title("Accuracy, time and bytes at the end")
    style.accuracy_axis(panels[0])
    best = "; ".join(point.title for point in front)
    return style.with_legend(figure, drawn, f"Points of accuracy against time and bytes. On the Pareto front: {best}.")


def pareto_front(points: Sequence[EndPoint]) -> list[EndPoint]:
    """Return the points that no other point beats."""
    return [point for point in points if not any(other.beats(point) for other in points)]


def _end_point(results: Results, group: RunGroup) -> EndPoint | None:
    ends = results.evaluations(group).groupby("run_id").last()
    ends = ends.dropna(subset=["test_accuracy", "train_time_s", "bytes_sent"])
    if not len(ends):
        return None
    accuracy, time, sent = (
        (float(ends[name].mean()), float(ends[name].min()), float(ends[name].max()))
        for name in ("test_accuracy", "train_time_s", "bytes_sent")
    )
    return EndPoint(title=group.title, accuracy=accuracy, time=time, bytes=sent)
