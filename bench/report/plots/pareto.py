"""Draw accuracy, time and bytes at the end of training, and mark the configurations on the Pareto front."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bench.report.configurations import Configuration, format_value
from bench.report.plots import style
from bench.report.plots.picture import Picture
from bench.report.plots.results import NotDrawable, Results


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Mean, lowest and highest value over seeds of each of the three quantities of a configuration."""

    title: str
    accuracy: tuple[float, float, float]
    time: tuple[float, float, float]
    bytes: tuple[float, float, float]

    def beats(self, other: Point) -> bool:
        """Return True if this point is at least as good in all three quantities and better in one."""
        ours = (-self.accuracy[0], self.time[0], self.bytes[0])
        theirs = (-other.accuracy[0], other.time[0], other.bytes[0])
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def draw(results: Results) -> Picture:
    """Draw accuracy against time and against bytes; filled markers are on the Pareto front of all three."""
    points = [point for each in results.configurations if (point := _point(results, each))]
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
    style.legend(figure, drawn)
    titles = "; ".join(point.title for point in front)
    return Picture(figure=figure, alt=f"Points of accuracy against time and bytes. On the Pareto front: {titles}.")


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other point beats."""
    return [point for point in points if not any(other.beats(point) for other in points)]


def _point(results: Results, configuration: Configuration) -> Point | None:
    ends = results.evaluations(configuration).groupby("run_id").last()
    ends = ends.dropna(subset=["test_accuracy", "train_time_s", "bytes_sent"])
    if not len(ends):
        return None
    accuracy, time, sent = (
        (float(ends[name].mean()), float(ends[name].min()), float(ends[name].max()))
        for name in ("test_accuracy", "train_time_s", "bytes_sent")
    )
    return Point(title=configuration.title, accuracy=accuracy, time=time, bytes=sent)
