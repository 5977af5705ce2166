"""Draw the quality of models against its cost in time or bytes, and how soon runs reach their target.

The quality is test accuracy or, for a text, bits per byte. Curves show it during training, and points with the Pareto
front at the end of training. How soon runs reach their target is drawn as Kaplan-Meier curves over the seeds of a
configuration, and as a performance profile over many workloads.

Source: E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", Journal of the American
Statistical Association 53 (1958); E. D. Dolan and J. J. More, "Benchmarking optimization software with performance
profiles", Mathematical Programming 91 (2002).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.report.columns import format_value
from bench.report.groups import WORKLOAD, RunGroup, group_runs
from bench.report.plots import style
from bench.report.plots.results import NotDrawable, Results, last_known, shortly_labelled

if TYPE_CHECKING:
    import pandas as pd

_SHIFT = 0.008  # Kaplan-Meier curves are shifted by this share of the height, so that equal curves stay visible


def draw_curves(results: Results, cost: str, what: str, unit_of: str) -> style.Picture:
    """Draw one curve per configuration: the mean over seeds of accuracy, or of bits per byte, against a cost.

    A band around the curve reaches from the lowest to the highest value of any seed.

    Args:
        results: the runs.
        cost: column of `Results.evaluations` with the cost: ``train_time_s``, ``epoch``, or ``bytes_sent``, whose axis
            is logarithmic if the values span a wide range.
        what: the cost in words.
        unit_of: the column of metrics.csv that has the same unit as the cost.

    Raises:
        NotDrawable: no finished run has both the quality and the cost.
    """
    quality = results.quality
    curves = results.drawable(
        results.measured,
        lambda group: _curve(results, group, cost),
        f"test {quality.noun} against {what} needs a finished run with values in {quality.column} and {unit_of}",
    )
    figure, (axes,) = style.new_figure(title=f"Test {quality.noun} against {what}")
    lines, ends = {}, []
    for title, look, curve in curves:
        (lines[title],) = axes.plot(curve["cost"], curve["mean"], **look)
        style.tooltips(
            lines[title],
            *(
                f"{title}: {quality.format(mean)} after {format_value(unit_of, cost)}, "
                f"seeds from {quality.format(low)} to {quality.format(high)}"
                for cost, mean, low, high in curve[["cost", "mean", "low", "high"]].to_numpy().tolist()
            ),
        )
        axes.fill_between(curve["cost"], curve["low"], curve["high"], color=look["color"], alpha=0.15, linewidth=0)
        mean, end = quality.in_words(curve["mean"].iloc[-1]), format_value(unit_of, curve["cost"].iloc[-1])
        ends.append(f"{title} {mean} after {end}")
    style.name_axis(axes, "x", what, unit_of, log=cost == "bytes_sent")
    style.quality_axis(axes, quality)
    return style.with_legend(
        figure, lines, f"Curves of test {quality.noun} against {what}. At the end: {'; '.join(ends)}."
    )


def _curve(results: Results, group: RunGroup, cost: str) -> pd.DataFrame:
    # Mean cost, and mean, lowest and highest quality, at every step at which all seeds were evaluated.
    column = results.quality.column
    known = results.evaluations(group).dropna(subset=[column, cost])
    steps = known.groupby("step")
    curve = steps.agg(cost=(cost, "mean"), mean=(column, "mean"), low=(column, "min"), high=(column, "max"))
    return curve[steps["run_id"].nunique() == known["run_id"].nunique()]


def draw_pareto(results: Results) -> style.Picture:
    """Draw the final quality against training time and against bytes sent, with one point per configuration.

    Filled markers are on the Pareto front of quality, time and bytes.

    Raises:
        NotDrawable: fewer than two configurations have values of quality, time and bytes.
    """
    quality = results.quality
    needs = (
        f"the Pareto front needs two configurations with values in {quality.column}, train_time_s and "
        "payload_bytes_per_step"
    )
    points = results.drawable(results.measured, lambda group: _ends(results, group), needs)
    if len(points) < 2:
        raise NotDrawable(needs)
    front = pareto_front({title: (quality.cost(ends[0][0]), ends[1][0], ends[2][0]) for title, _, ends in points})
    figure, panels = style.new_figure(
        columns=2, sharey=True, title=f"{quality.noun.capitalize()}, time and bytes at the end"
    )
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
                **look | {"linestyle": ""},
                markerfacecolor=look["color"] if title in front else "white",
                markersize=7,
                elinewidth=0.8,
            )
            text = f"{title}: {quality.format(y[0])}, {what} {format_value(column, x[0])}"
            style.tooltips(drawn[title].lines[0], text)
        style.name_axis(axes, "x", what, column, log=True)
    style.quality_axis(panels[0], quality)
    return style.with_legend(
        figure, drawn, f"Points of {quality.noun} against time and bytes. On the Pareto front: {'; '.join(front)}."
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
    # For quality, time and bytes at the end of training: (mean, lowest, highest) over seeds; empty if one is unknown.
    columns = [results.quality.column, "train_time_s", "bytes_sent"]
    ends = results.evaluations(group).groupby("run_id")[columns].last().dropna()
    return [(float(each.mean()), float(each.min()), float(each.max())) for _, each in ends.items() if len(each)]


def draw_kaplan_meier(results: Results) -> style.Picture:
    """Draw the share of seeds that have reached the target against optimizer steps, with one curve per configuration.

    A mark shows where the training of a seed ended before it reached its target.

    Raises:
        NotDrawable: no finished run has a target.
    """
    last = float(max(row["step"] or 0 for row in results.rows))
    groups = [group for group in group_runs(results.runs) if group.ok or group.diverged]
    quality = results.quality
    seeds = results.drawable(
        shortly_labelled([group for group in groups if group.quality is quality]),
        lambda group: steps_to_target(group, last),
        f"steps to target need a finished run with {quality.target_flag}",
    )
    figure, (axes,) = style.new_figure(title=f"Steps to the target {quality.noun}")
    curves, counts = {}, []
    for number, (title, look, each) in enumerate(seeds):
        waiting = survival(each)
        shift = number * _SHIFT
        missed = [step for step, hit in each if not hit]
        watched_until = max(step for step, _ in each) if missed else last  # the share is unknown later
        steps = [0.0, *waiting.quantiles, watched_until]
        shares = [shift, *(1.0 - waiting.probabilities + shift), 1.0 - waiting.probabilities[-1] + shift]
        (curves[title],) = axes.plot(steps, shares, drawstyle="steps-post", **look | {"marker": ""})
        style.tooltips(curves[title], f"{title}: {len(each) - len(missed)} of {len(each)} seeds reached the target")
        axes.plot(
            missed,
            1.0 - waiting.evaluate(missed) + shift,
            linestyle="",
            marker="|",
            markersize=11,
            color=look["color"],
        )
        counts.append(f"{title} {len(each) - len(missed)} of {len(each)}")
    style.name_axis(axes, "x", "optimizer steps", "step")
    axes.set(ylim=(-0.02, 1.04 + len(seeds) * _SHIFT), yticks=[0.0, 0.25, 0.5, 0.75, 1.0])
    style.name_axis(axes, "y", "seeds that reached the target", "test_accuracy")
    return style.with_legend(
        figure, curves, f"Kaplan-Meier curves. Seeds that reached the target: {'; '.join(counts)}."
    )


def steps_to_target(group: RunGroup, last: float) -> list[tuple[float, bool]]:
    """Return a tuple (step, reached) for each successful or diverged run that has a target.

    If the run reached the target, ``step`` is the step of the first evaluation that met the target. Otherwise ``step``
    is the last step of the run; if the run diverged, ``step`` is ``last``, because such a run would have missed the
    target with any number of steps.

    Args:
        group: the runs.
        last: the highest step of any run in the picture.
    """
    seeds = []
    for run in (
        run for run in (*group.ok, *group.diverged) if run.last_known.get(group.quality.target_column) is not None
    ):
        reached = [row["step"] for row in run.rows if row["time_to_target_s"] is not None]
        watched_until = last if run.diverged else max(row["step"] or 0 for row in run.rows)
        seeds.append((float(reached[0] if reached else watched_until), bool(reached)))
    return seeds


def survival(seeds: Sequence[tuple[float, bool]]) -> Any:
    """Return the Kaplan-Meier estimate of the share of seeds that have not reached the target by a given step.

    Args:
        seeds: for each seed, (step at which it reached the target, True), or (step until which it is known to have
            missed it, False).

    Returns:
        SciPy's ``EmpiricalDistributionFunction``, a function of the step.
    """
    from scipy import stats

    steps, hits = zip(*seeds, strict=True)
    return stats.ecdf(stats.CensoredData.right_censored(steps, [not hit for hit in hits])).sf


def draw_profile(results: Results) -> style.Picture:
    """Draw a performance profile: the share of workloads on which each method is within a factor of the best time.

    A method is within the factor on a workload if its time to the target is at most the factor times the time of the
    fastest method. Each seed of a workload counts as a workload. A missed target never counts.

    Raises:
        NotDrawable: fewer than two methods ran with a target on the same two workloads.
    """
    factors = slow_downs(_times(results))
    looks = results.looks(results.across(*WORKLOAD))
    figure, (axes,) = style.new_figure(title=f"Performance profile over {len(factors)} workloads")
    finite = factors.to_numpy()[~factors.isin([math.inf]).to_numpy()]
    last = max(1.1, float(finite.max()) * 1.05)
    curves, words = {}, []
    for title, values in factors.items():
        reached = sorted(value for value in values if value < math.inf)
        shares = [(count + 1) / len(values) for count in range(len(reached))]
        (curves[str(title)],) = axes.plot(
            [1.0, *reached, last],
            [0.0, *shares, shares[-1] if shares else 0.0],
            drawstyle="steps-post",
            **looks[str(title)],
        )
        style.tooltips(curves[str(title)], str(title))
        words.append(f"{title} is the fastest on {(values == 1.0).mean():.0%}")
    style.name_axis(axes, "x", "time to target / time of the fastest method (factor)", None, log=True)
    axes.set_ylim(-0.02, 1.04)
    style.name_axis(axes, "y", "workloads within this factor", "test_accuracy")
    return style.with_legend(figure, curves, f"Performance profile. Of {len(factors)} workloads, {'; '.join(words)}.")


def slow_downs(times: pd.DataFrame) -> pd.DataFrame:
    """Return the time of each method divided by the best time on the same workload.

    Args:
        times: seconds to target, with a row per workload and a column per method; infinite if the target was missed.

    Returns:
        Factors of at least 1, with the same rows and columns, but without the workloads on which every method missed
        the target.
    """
    best = times.min(axis=1)
    return times[best < math.inf].div(best[best < math.inf], axis=0)


def _times(results: Results) -> pd.DataFrame:
    # Seconds to target, with a row per workload and seed and a column per method, for workloads that all methods ran.
    import pandas as pd

    columns = {}
    for group in results.across(*WORKLOAD):
        runs = last_known(group, diverged=True)
        runs = runs[runs[["target_accuracy", "target_bits_per_byte"]].notna().any(axis=1)]
        if len(runs):
            done = runs[list(WORKLOAD)].astype(str).apply(tuple, axis=1)
            index = pd.MultiIndex.from_arrays([done, runs["seed"]])
            columns[group.title] = runs["time_to_target_s"].fillna(math.inf).set_axis(index)
    times = pd.DataFrame(columns).dropna()
    workloads = {workload for workload, _ in times.index}
    if times.shape[1] < 2 or len(workloads) < 2 or not (times < math.inf).to_numpy().any():
        raise NotDrawable(
            "a performance profile needs two methods that ran with --target-accuracy on the same two workloads "
            "(models, data sets, links, ...)"
        )
    return times
