"""Draw test accuracy against its cost: as curves over the training, and as points at its end with the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.report.columns import format_value
from bench.report.groups import RunGroup
from bench.report.plots import style
from bench.report.plots.results import NotDrawable, Results

if TYPE_CHECKING:
    import pandas as pd


def draw_curves(results: Results, cost: str, what: str, unit_of: str) -> style.Picture:
    """Draw one curve per configuration: its mean test accuracy over seeds against a cost.

    A band reaches from the lowest seed to the highest.

    Args:
        results: the runs.
        cost: column of `Results.evaluations` with the cost: ``train_time_s``, ``epoch``, or ``bytes_sent``, whose axis
            is logarithmic if the values span a wide range.
        what: the cost in words.
        unit_of: the column of metrics.csv that has the same unit as the cost.

    Raises:
        NotDrawable: no finished run has both the accuracy and the cost.
    """
    curves = results.drawable(
        results.configurations,
        lambda group: _curve(results, group, cost),
        f"test accuracy against {what} needs a finished run with values in test_accuracy and {unit_of}",
    )
    figure, (axes,) = style.new_figure(title=f"Test accuracy against {what}")
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
    style.name_axis(axes, "x", what, unit_of, log=cost == "bytes_sent")
    style.accuracy_axis(axes)
    return style.with_legend(figure, lines, f"Curves of test accuracy against {what}. At the end: {'; '.join(ends)}.")


def _curve(results: Results, group: RunGroup, cost: str) -> pd.DataFrame:
    # Mean cost, and mean, lowest and highest accuracy, at every step at which all seeds were evaluated.
    known = results.evaluations(group).dropna(subset=["test_accuracy", cost])
    steps = known.groupby("step")
    curve = steps.agg(
        cost=(cost, "mean"), mean=("test_accuracy", "mean"), low=("test_accuracy", "min"), high=("test_accuracy", "max")
    )
    return curve[steps["run_id"].nunique() == known["run_id"].nunique()]


def draw_pareto(results: Results) -> style.Picture:
    """Draw the final test accuracy against training time and against bytes sent, with one point per configuration.

    Filled markers are on the Pareto front of accuracy, time and bytes.

    Raises:
        NotDrawable: fewer than two configurations have values of all three.
    """
    needs = (
        "the Pareto front needs two configurations with values in test_accuracy, train_time_s and "
        "payload_bytes_per_step"
    )
    points = results.drawable(results.configurations, lambda group: _ends(results, group), needs)
    if len(points) < 2:
        raise NotDrawable(needs)
    front = pareto_front({title: (-ends[0][0], ends[1][0], ends[2][0]) for title, _, ends in points})
    figure, panels = style.new_figure(columns=2, sharey=True, title="Accuracy, time and bytes at the end")
    drawn = {}
    for axes, quantity, what, column in (
        (panels[0], 1, "training time", "train_time_s"),
        (panels[1], 2, "bytes sent per rank", "payload_bytes_per_step"),
    ):
        for title, look, ends in points:
            x, y = ends[quantity], ends[0]
            drawn[title] = axes.errorbar(
                x[0],
                y[0],
                xerr=style.whiskers([x]),
                yerr=style.whiskers([y]),
                **style.marker(*look),
                markerfacecolor=style.color(*look) if title in front else "white",
                markersize=7,
                linestyle="",
                elinewidth=0.8,
            )
            style.tooltips(drawn[title].lines[0], f"{title}: {y[0]:.2%}, {what} {format_value(column, x[0])}")
        style.name_axis(axes, "x", what, column, log=True)
    style.accuracy_axis(panels[0])
    return style.with_legend(
        figure, drawn, f"Points of accuracy against time and bytes. On the Pareto front: {'; '.join(front)}."
    )


def pareto_front(costs: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Return the names on the Pareto front.

    A name is on the front unless another name has costs that are at most as high in every quantity and lower in at
    least one.

    Args:
        costs: for each name, its cost in each quantity; lower is better.
    """
    return [
        name
        for name, ours in costs.items()
        if not any(
            theirs != ours and all(a <= b for a, b in zip(theirs, ours, strict=True)) for theirs in costs.values()
        )
    ]


def _ends(results: Results, group: RunGroup) -> list[tuple[float, float, float]]:
    # Mean, lowest and highest accuracy, time and bytes over seeds at the end of training; nothing if one is not known.
    ends = results.evaluations(group).groupby("run_id")[["test_accuracy", "train_time_s", "bytes_sent"]].last().dropna()
    return [(float(each.mean()), float(each.min()), float(each.max())) for _, each in ends.items() if len(each)]
