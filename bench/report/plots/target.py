"""Draw the share of seeds that have reached the target accuracy against steps; a seed that missed it is censored.

Source: E. L. Kaplan and P. Meier, "Nonparametric estimation from incomplete observations", Journal of the American
Statistical Association 53 (1958).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.report.configurations import Configuration
from bench.report.plots import style
from bench.report.plots.picture import Picture
from bench.report.plots.results import NotDrawable, Results

_SHIFT = 0.008  # share of the height by which curves are shifted, so that equal ones stay visible


def draw(results: Results) -> Picture:
    """Draw one rising curve per configuration, with a mark where a seed's training ended before its target."""
    last = float(max(row["step"] or 0 for row in results.rows))
    seeds = {each.title: steps_to_target(each, last) for each in results.that_ended}
    seeds = {title: each for title, each in seeds.items() if each}
    if not seeds:
        raise NotDrawable("steps to target need a finished run with --target-accuracy")
    figure, (axes,) = style.new_figure()
    curves, counts = {}, []
    looks = results.looks(results.that_ended)
    for number, (title, each) in enumerate(seeds.items()):
        reached = share_reached(each)
        shift = number * _SHIFT
        missed = [step for step, hit in each if not hit]
        watched_until = max(step for step, _ in each) if missed else last  # unknown beyond
        steps = [0.0, *reached.quantiles, watched_until]
        shares = [shift, *(1.0 - reached.probabilities + shift), 1.0 - reached.probabilities[-1] + shift]
        (curves[title],) = axes.plot(
            steps, shares, drawstyle="steps-post", **style.line(*looks[title]) | {"marker": ""}
        )
        style.tooltips(curves[title], f"{title}: {len(each) - len(missed)} of {len(each)} seeds reached the target")
        axes.plot(
            missed,
            1.0 - reached.evaluate(missed) + shift,
            linestyle="",
            marker="|",
            markersize=11,
            color=style.color(*looks[title]),
        )
        counts.append(f"{title} {len(each) - len(missed)} of {len(each)}")
    axes.set_title("Steps to the target accuracy")
    style.name_axis(axes, "x", "optimizer steps", "step")
    axes.set_ylim(-0.02, 1.04 + len(seeds) * _SHIFT)
    axes.set_yticks([0.0, 0.25, 0.5, 0.75, 1.0])
    style.name_axis(axes, "y", "seeds that reached the target", "test_accuracy")
    style.legend(figure, curves)
    return Picture(figure=figure, alt=f"Kaplan-Meier curves. Seeds that reached the target: {'; '.join(counts)}.")


def steps_to_target(configuration: Configuration, last: float) -> list[tuple[float, bool]]:
    """Return for each seed with a target the step that reached it and True, or its last step and False.

    A diverged seed would have missed it with any number of steps, so it counts up to ``last``, the last step of all.
    """
    seeds = []
    for run in (*configuration.ok, *configuration.diverged):
        if run["target_accuracy"] is None:
            continue
        reached = [row["step"] for row in run.rows if row["time_to_target_s"] is not None]
        watched_until = last if run.diverged else max(row["step"] or 0 for row in run.rows)
        seeds.append((float(next(iter(reached), watched_until)), bool(reached)))
    return seeds


def share_reached(seeds: Sequence[tuple[float, bool]]) -> Any:
    """Return Kaplan and Meier's estimate of the share that has not reached the target, as a function of the step."""
    from scipy import stats

    steps = [step for step, _ in seeds]
    missed = [not hit for _, hit in seeds]
    return stats.ecdf(stats.CensoredData.right_censored(steps, missed)).sf
