"""The pictures of a decision, with sentences that explain how to read them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from bench.core.units import format_seconds
from bench.deciding.answer import TITLE_WIDTH, WIDTH_IN, Answer
from bench.deciding.decision import Evidence
from bench.deciding.tables import step_seconds
from bench.deciding.trajectory import Trajectory
from bench.report.plots.style import (
    GREY,
    PALETTE,
    Picture,
    applied,
    line,
    name_axis,
    new_figure,
    quality_axis,
    tooltips,
    with_legend,
    wrapped,
)

_NAME_WIDTH = 30  # characters
_READINGS = {
    "decision": "How many times sooner each method reaches the target than the baseline. A method is faster if its "
    "whole interval lies to the right of 1.",
    "epochs": "Each line is one seed. Where a method lies below the baseline, compression costs quality per epoch.",
    "time": "The same trainings over time on the link: further left is sooner. Evaluations are not counted.",
    "step-times": "Each dot is the mean duration of a step in one job on the link. The further apart the dots of a "
    "method are, the less sure its time is.",
}


def pictures_of(answer: Answer) -> dict[str, tuple[Picture, str]]:
    """Return the pictures of a decision by name, each with sentences that explain how to read it."""
    with applied():
        found = {
            "decision": answer.picture(),
            "epochs": _curves(answer, "epochs", "epoch", _epochs),
            "time": _curves(answer, "training time on the link", "train_time_s", _seconds),
        }
        if any(each.step_times is not None for each in answer.evidence):
            found["step-times"] = _step_times(answer)
    return {name: (picture, _READINGS[name]) for name, picture in found.items()}


def _epochs(_evidence: Evidence, trajectory: Trajectory) -> list[float]:
    return [row["epoch"] for row in trajectory.rows]


def _seconds(evidence: Evidence, trajectory: Trajectory) -> list[float]:
    if evidence.step_times is None:
        return [row["train_time_s"] for row in trajectory.rows]
    steps: Counter[float] = Counter()
    seconds = []
    for _, number, nbytes in trajectory.intervals:
        steps[nbytes] += number
        seconds.append(trajectory.start_s + evidence.step_times.training_s(steps))
    return seconds


def _curves(answer: Answer, what: str, column: str, costs: Callable[[Evidence, Trajectory], list[float]]) -> Picture:
    """Return a picture of the quality of all seeds of all methods against a cost.

    Args:
        answer: the decision.
        what: the cost in words.
        column: the column of metrics.csv with the cost's unit.
        costs: returns the cost at each evaluation of a training.
    """
    quality = answer.baseline.quality
    model, dataset = answer.workload
    title = wrapped(f"{model} on {dataset}: test {quality.noun} against {what}", TITLE_WIDTH)
    figure, (axes,) = new_figure(width=WIDTH_IN, height=3.0, title=title)
    handles: dict[str, Any] = {}
    for index, evidence in enumerate(answer.evidence):
        is_whole = evidence.step_times is None and column != "epoch"
        for each in evidence.whole_runs if is_whole else evidence.trajectories:
            values = [row[quality.column] for row in each.rows]
            look = line(index) | {"marker": "", "linewidth": 1.0}
            (curve,) = axes.plot(costs(evidence, each), values, **look)
            tooltips(curve, f"{evidence.method}, seed {each.seed}")
            handles[evidence.method] = curve
    handles["target"] = axes.axhline(answer.target, color=GREY, linewidth=0.8, linestyle="--", zorder=1)
    quality_axis(axes, quality)
    name_axis(axes, "x", what, column)
    alt = f"Test {quality.noun} against {what}, one line per seed, of {', '.join(handles)}."
    return with_legend(figure, handles, alt)


def _step_times(answer: Answer) -> Picture:
    timed = [each for each in answer.evidence if each.step_times is not None]
    names = [wrapped(each.method, _NAME_WIDTH) for each in timed]
    figure, (axes,) = new_figure(
        height=0.9 + sum(0.3 + 0.15 * (1 + name.count("\n")) for name in names),
        width=WIDTH_IN,
        title="Duration of a step on the link, one dot per job",
    )
    said = []
    for place, evidence in enumerate(timed):
        mean, jobs = step_seconds(evidence)
        said.append(f"{evidence.method} {format_seconds(mean)}")
        axes.scatter(jobs, [place] * len(jobs), color=PALETTE[place % len(PALETTE)], s=18, alpha=0.7)
    axes.set(yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    axes.set_xlim(left=0.0)
    name_axis(axes, "x", "step", "step_time_s")
    return Picture(figure=figure, alt=f"Mean duration of a step on the link: {', '.join(said)}.")
