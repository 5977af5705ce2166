"""Draw how soon runs reach the target accuracy: a configuration's seeds, and methods over many workloads.

The pictures are Kaplan-Meier curves and a performance profile.

Source: E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", Journal of the American
Statistical Association 53 (1958); E. D. Dolan and J. J. More, "Benchmarking optimization software with performance
profiles", Mathematical Programming 91 (2002).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bench.report.groups import WORKLOAD, RunGroup, group_runs
from bench.report.plots import style
from bench.report.plots.results import NotDrawable, Results, last_known, shortly_labelled

if TYPE_CHECKING:
    import pandas as pd

_SHIFT = 0.008  # share of the height by which curves are shifted, so that equal ones stay visible


def draw_kaplan_meier(results: Results) -> style.Picture:
    """Draw the share of seeds that have reached the target against optimizer steps, with one curve per configuration.

    A mark shows where the training of a seed ended before it reached its target.

    Raises:
        NotDrawable: no finished run has a target accuracy.
    """
    last = float(max(row["step"] or 0 for row in results.rows))
    groups = [group for group in group_runs(results.runs) if group.ok or group.diverged]
    seeds = results.drawable(
        shortly_labelled(groups),
        lambda group: steps_to_target(group, last),
        "steps to target need a finished run with --target-accuracy",
    )
    figure, (axes,) = style.new_figure(title="Steps to the target accuracy")
    curves, counts = {}, []
    for number, (title, look, each) in enumerate(seeds):
        waiting = survival(each)
        shift = number * _SHIFT
        missed = [step for step, hit in each if not hit]
        watched_until = max(step for step, _ in each) if missed else last  # unknown beyond
        steps = [0.0, *waiting.quantiles, watched_until]
        shares = [shift, *(1.0 - waiting.probabilities + shift), 1.0 - waiting.probabilities[-1] + shift]
        (curves[title],) = axes.plot(steps, shares, drawstyle="steps-post", **style.line(*look) | {"marker": ""})
        style.tooltips(curves[title], f"{title}: {len(each) - len(missed)} of {len(each)} seeds reached the target")
        axes.plot(
            missed,
            1.0 - waiting.evaluate(missed) + shift,
            linestyle="",
            marker="|",
            markersize=11,
            color=style.color(*look),
        )
        counts.append(f"{title} {len(each) - len(missed)} of {len(each)}")
    style.name_axis(axes, "x", "optimizer steps", "step")
    axes.set(ylim=(-0.02, 1.04 + len(seeds) * _SHIFT), yticks=[0.0, 0.25, 0.5, 0.75, 1.0])
    style.name_axis(axes, "y", "seeds that reached the target", "test_accuracy")
    return style.with_legend(
        figure, curves, f"Kaplan-Meier curves. Seeds that reached the target: {'; '.join(counts)}."
    )


def steps_to_target(group: RunGroup, last: float) -> list[tuple[float, bool]]:
    """Return a pair (step, reached) for each successful or diverged run that has a target accuracy.

    If the run reached the target, ``step`` is the first evaluated step at which it had. Otherwise ``step`` is the last
    step of the run, or ``last`` if the run diverged, because it would have missed the target with any number of steps.

    Args:
        group: the runs.
        last: the last step of all runs in the picture.
    """
    seeds = []
    for run in (run for run in (*group.ok, *group.diverged) if run["target_accuracy"] is not None):
        reached = [row["step"] for row in run.rows if row["time_to_target_s"] is not None]
        watched_until = last if run.diverged else max(row["step"] or 0 for row in run.rows)
        seeds.append((float(reached[0] if reached else watched_until), bool(reached)))
    return seeds


def survival(seeds: Sequence[tuple[float, bool]]) -> Any:
    """Return the Kaplan-Meier estimate of the share of seeds that have not reached the target by a given step.

    Args:
        seeds: pairs as returned by `steps_to_target`.

    Returns:
        SciPy's ``EmpiricalDistributionFunction``, a function of the step.
    """
    from scipy import stats

    steps, hits = zip(*seeds, strict=True)
    return stats.ecdf(stats.CensoredData.right_censored(steps, [not hit for hit in hits])).sf


def draw_profile(results: Results) -> style.Picture:
    """Draw for each method the share of workloads on which its time to target is within a factor of the best time.

    Each seed of a workload counts as a workload. A missed target is within no factor.

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
            **style.line(*looks[str(title)]),
        )
        style.tooltips(curves[str(title)], str(title))
        words.append(f"{title} is the fastest on {(values == 1.0).mean():.0%}")
    style.name_axis(axes, "x", "time to target / that of the fastest method (factor)", None, log=True)
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
    # Seconds to target by workload and seed (rows) and method (columns), for workloads of all methods.
    import pandas as pd

    columns = {}
    for group in results.across(*WORKLOAD):
        runs = last_known(group, diverged=True).dropna(subset=["target_accuracy"])
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
