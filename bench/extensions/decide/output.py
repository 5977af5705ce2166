"""Output of `bench decide`: the answer in one sentence, a table, a picture and files."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from bench.cli.console import table_of
from bench.core.files import writing
from bench.core.run_folder import write_json
from bench.core.units import format_rate, format_seconds
from bench.extensions.decide.decision import MethodDecision, best_of, log_ratios, seeds_in_words
from bench.extensions.decide.search import StudyResult
from bench.report.columns import NOTHING, format_factor, format_interval, format_points
from bench.report.plots.style import PALETTE, Picture, applied, new_figure, save, with_legend, wrapped, write_ticks
from bench.report.quality import Quality


def sentences(answer: StudyResult) -> list[str]:
    """Return the answer: first one sentence that starts with Yes, No or Open, then what is open and what it costs."""
    baseline, quality = answer.evidence[0].method, answer.evidence[0].quality
    target = quality.target_title(answer.target)
    still_open = [each for each in answer.decisions if each.verdict == "open"]
    best = best_of(answer.decisions)
    if best.verdict == "faster":
        head = f"Yes, {quality.but_worse}" if best.accuracy_verdict == quality.beyond else "Yes"
        first = (
            f"{head}: {best.method} reaches {target} {_times(best)} sooner than {baseline} on this link, decided after "
            f"{seeds_in_words(best.num_seeds)}; {quality.noun} {_change_in_words(quality, best)}."
        )
    elif still_open:
        reached = f"reaches {target} {_times(best)} as soon as {baseline}" if best.factor else f"missed {target} so far"
        first = f"Open: {best.method} {reached} on this link, not decided after {seeds_in_words(best.num_seeds)}."
    else:
        first = f"No: no method reaches {target} sooner than {baseline} on this link."
    found = [first]
    if answer.stopped and still_open:
        cost = f", at about {format_seconds(answer.next_seed_s)} per further seed" if answer.next_seed_s else ""
        found.append(f"Open {answer.stopped}: {', '.join(each.method for each in still_open)}{cost}.")
    are_composed = answer.evidence[0].step_times is not None
    if not answer.checks and are_composed:
        found.append("Times are composed and were not checked by whole runs on this link.")
    elif worst := max(answer.checks, key=lambda each: (not each.is_same_training, abs(each.deviation)), default=None):
        seen = f"a whole run of {worst.method} on the link took {format_seconds(worst.measured_s)}"
        beside = f"and its composed time is {format_seconds(worst.composed_s)} ({worst.deviation:+.1%})"
        other = "" if worst.is_same_training else ", and trained other numbers than without the link"
        used = "" if are_composed else f"{other}, so whole runs of all methods count instead"
        found.append(f"Check: {seen}, {beside}{used}.")
    if any(not each.reached for each in answer.evidence[0].times):
        missed = sum(not each.reached for each in answer.evidence[0].times)
        found.append(
            f"The baseline missed the target with {missed} of {seeds_in_words(len(answer.evidence[0].times))} "
            "(left out of the factors)."
        )
    return found


def _times(decision: MethodDecision) -> str:
    return format_interval(f"{format_factor(decision.factor or 0.0)}x", *_bounds(decision))


def _bounds(decision: MethodDecision) -> tuple[str | None, str | None]:
    is_known = decision.low > 0.0 and decision.high < math.inf
    return (format_factor(decision.low), format_factor(decision.high)) if is_known else (None, None)


def _change(decision: MethodDecision) -> str:
    if decision.accuracy is None:
        return NOTHING
    is_known = decision.accuracy_low > -math.inf
    bounds = (format_points(decision.accuracy_low), format_points(decision.accuracy_high)) if is_known else (None, None)
    return format_interval(format_points(decision.accuracy), *bounds)


def _change_in_words(quality: Quality, decision: MethodDecision) -> str:
    verdict = "still open" if decision.accuracy_verdict == "open" else f"{decision.accuracy_verdict} the margin"
    return f"{_change(decision)} {quality.units[0]}, {verdict}"


def print_answer(answer: StudyResult, console: Console) -> None:
    """Print the sentences and the table."""
    for sentence in sentences(answer):
        console.print(sentence, soft_wrap=True, markup=False)
    origin = "whole runs on the link"
    if answer.evidence[0].step_times is not None:
        origin = "measured step times"
    baseline, quality = answer.evidence[0].method, answer.evidence[0].quality
    headings = ["reached", "to target", f"sooner than {baseline}", "verdict", quality.noun]
    rows = []
    for evidence in answer.evidence:
        times = evidence.times
        decision = next((each for each in answer.decisions if each.method == evidence.method), None)
        reached = [each.seconds for each in times if each.reached]
        row = [
            evidence.method,
            f"{len(reached)}/{len(times)}",
            format_seconds(sum(reached) / len(reached)) if reached else NOTHING,
        ]
        if decision is None:
            row += [NOTHING, "baseline", NOTHING]
        else:
            row += [
                _times(decision) if decision.factor else NOTHING,
                decision.verdict,
                NOTHING
                if decision.accuracy is None
                else f"{format_points(decision.accuracy)} {decision.accuracy_verdict}",
            ]
        rows.append(row)
    console.print(table_of(("method",), headings, rows))
    console.print(f"to target: mean over seeds that reached it, from {origin}", soft_wrap=True, markup=False)
    console.print(f"{quality.noun}: {quality.units[1]} more than {baseline}", soft_wrap=True, markup=False)
    if answer.faster_up_to:
        limits = [f"{method} {_rate(answer, rate)}" for method, rate in answer.faster_up_to.items()]
        console.print(f"faster up to: {', '.join(sorted(limits))}", soft_wrap=True, markup=False)


def _rate(answer: StudyResult, rate: float) -> str:
    return f">{format_rate(max(answer.rates_tried))}" if rate == math.inf else format_rate(rate)


def to_dict(answer: StudyResult) -> dict[str, Any]:
    """Return the answer as JSON values; bounds that are not known are null."""

    def finite(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return None
        if isinstance(value, dict):
            return {name: finite(each) for name, each in value.items()}
        return [finite(each) for each in value] if isinstance(value, list | tuple) else value

    quality = answer.evidence[0].quality
    content = {
        "answer": sentences(answer),
        quality.target_column: answer.target,
        "rule": dataclasses.asdict(answer.rule),
        "base": answer.study.base,
        "methods": answer.study.methods,
        "decisions": [
            {name.replace("accuracy", quality.name): value for name, value in dataclasses.asdict(each).items()}
            for each in answer.decisions
        ],
        "checks": [dataclasses.asdict(each) | {"deviation": each.deviation} for each in answer.checks],
        "faster_up_to_bps": answer.faster_up_to,
        "rates_tried_bps": answer.rates_tried,
        "stopped": answer.stopped,
        "warnings": answer.warnings,
    }
    return dict(finite(content))


def rows_of(answer: StudyResult) -> list[dict[str, Any]]:
    """Return one row per method and seed, with both parts of a composed time: steps, and the mean step time."""
    trained = {(e.method, each.seed): each for e in answer.evidence for each in e.trajectories}
    return [
        {
            "method": evidence.method,
            "seed": each.seed,
            "origin": each.origin,
            "reached": each.reached,
            "steps": each.num_steps,
            "mean_step_time_s": each.seconds / each.num_steps,
            "time_to_target_s": each.seconds if each.reached else None,
            "train_time_s": each.seconds,
            evidence.quality.column: trained[evidence.method, each.seed].accuracy,
            "held_bytes": trained[evidence.method, each.seed].run["held_bytes"],
        }
        for evidence in answer.evidence
        for each in evidence.times
    ]


def write_files(answer: StudyResult, folder: Path) -> None:
    """Write `decision.json`, `decision.csv` and `decision.svg` to the study's folder."""
    write_json(folder / "decision.json", to_dict(answer))
    with writing(folder / "decision.csv"):
        pd.DataFrame(rows_of(answer)).to_csv(folder / "decision.csv", index=False, lineterminator="\n")
    with applied():
        save(picture(answer), folder / "decision.svg")


_NAME_WIDTH = 40  # characters; longer names of methods would leave no room for the axes


def picture(answer: StudyResult) -> Picture:
    """Return a picture of the factors with their intervals; each dot is a seed."""
    from matplotlib.ticker import LogLocator  # takes long to import

    baseline, *candidates = answer.evidence
    target = baseline.quality.target_title(answer.target)
    verdicts = [f"{each.method}: {made.verdict}" for each, made in zip(candidates, answer.decisions, strict=True)]
    names = [wrapped(each, _NAME_WIDTH) for each in verdicts]
    figure, (axes,) = new_figure(
        height=0.9 + sum(0.3 + 0.15 * (1 + name.count("\n")) for name in names),
        title=f"Time to {target} accuracy" if baseline.quality.is_share else f"Time to {target}",
    )
    handles: dict[str, Any] = {}
    for place, (evidence, decision) in enumerate(zip(candidates, answer.decisions, strict=True)):
        ratios = [math.exp(each) for each in log_ratios(baseline.times, evidence.times)]
        handles["one seed"] = axes.scatter(ratios, [place] * len(ratios), color="0.6", s=14, zorder=2)
        if decision.factor is not None:
            low, high = (decision.low, decision.high) if _bounds(decision)[0] else (decision.factor, decision.factor)
            handles["mean, with its interval"] = axes.errorbar(
                decision.factor,
                place,
                xerr=[[decision.factor - low], [high - decision.factor]],
                fmt="o",
                color=PALETTE[1 + place % (len(PALETTE) - 1)],
                capsize=3,
                zorder=3,
            )
    axes.axvline(1.0, color="0.3", linewidth=0.8)
    axes.axvspan(1 / answer.rule.same, answer.rule.same, color="0.9", zorder=0)
    axes.set(xscale="log", yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
    axes.set_xlabel(f"speed-up over {baseline.method}, in time to the target")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
    write_ticks(axes, "x")
    alt = " ".join(sentences(answer))
    return with_legend(figure, handles, alt)
