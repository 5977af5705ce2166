"""Draw a performance profile: the share of workloads on which a method is within a factor of the fastest one.

Source: E. D. Dolan and J. J. More, "Benchmarking optimization software with performance profiles", Mathematical
Programming 91 (2002). Each seed of a workload counts as a workload; a missed target is within no factor.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from bench.report.plots import style
from bench.report.plots.picture import Picture
from bench.report.plots.results import NotDrawable, Results, last_known
from bench.report.selection import WORKLOAD

if TYPE_CHECKING:
    import pandas as pd


def draw(results: Results) -> Picture:
    """Draw one rising curve per method."""
    factors = slow_downs(_times(results))
    looks = results.looks(results.across(*WORKLOAD))
    figure, (axes,) = style.new_figure()
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
    axes.set_title(f"Performance profile over {len(factors)} workloads")
    style.name_axis(axes, "x", "time to target / that of the fastest method (factor)", None, log=True)
    axes.set_ylim(-0.02, 1.04)
    style.name_axis(axes, "y", "workloads within this factor", "test_accuracy")
    style.legend(figure, curves)
    return Picture(figure=figure, alt=f"Performance profile. Of {len(factors)} workloads, {'; '.join(words)}.")


def slow_downs(times: pd.DataFrame) -> pd.DataFrame:
    """Return the time of each method (column) over the best time of the workload (row).

    Args:
        times: seconds to target, infinite if it was missed. Rows in which every method missed are dropped.
    """
    best = times.min(axis=1)
    return times[best < math.inf].div(best[best < math.inf], axis=0)


def _times(results: Results) -> pd.DataFrame:
    """Return seconds to target by workload and seed (rows) and method (columns), for workloads of all methods."""
    import pandas as pd

    columns = {}
    for group in results.across(*WORKLOAD):
        runs = last_known(group, diverged=True).dropna(subset=["target_accuracy"])
        if len(runs):
            done = runs[list(WORKLOAD)].astype(str).apply(tuple, axis=1)
            seconds = runs["time_to_target_s"].fillna(math.inf)
            columns[group.title] = seconds.set_axis(pd.MultiIndex.from_arrays([done, runs["seed"]]))
    times = pd.DataFrame(columns).dropna()
    workloads = {workload for workload, _ in times.index}
    if times.shape[1] < 2 or len(workloads) < 2 or not (times < math.inf).to_numpy().any():
        raise NotDrawable(
            "a performance profile needs two methods that ran with --target-accuracy on the same two workloads "
            "(models, data sets, links, ...)"
        )
    return times
