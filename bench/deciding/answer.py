"""The answer of `bench decide`: sentences, a table, a picture and files."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.core.units import format_rate, format_seconds, parse_rate
from bench.deciding.decision import Evidence, MethodDecision, best_of, decide, log_ratios, seeds_in_words
from bench.deciding.load import Load, is_busy
from bench.deciding.study import LINK_OPTIONS, RULE_OPTIONS, DecideConfig, Study
from bench.report.columns import format_effect, format_factor, format_number, format_points
from bench.report.plots.style import (
    BAND,
    PALETTE,
    Picture,
    new_figure,
    whiskers,
    with_legend,
    wrapped,
    write_ticks,
)
from bench.report.store import frame

if TYPE_CHECKING:
    import pandas as pd

# No composed time (steps x measured step time) is used if one differs from a whole run by more than this share.
LARGEST_DEVIATION = 0.10
WIDTH_IN = 5.0  # of all pictures of a decision; so narrow that they can be read on a phone
TITLE_WIDTH = 66  # characters in that width
# If the ends of the axis differ by more than this factor, ticks have these first digits.
_TICKS = ((100.0, (1.0,)), (10.0, (1.0, 2.0, 5.0)), (3.0, (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)))
_NAME_WIDTH = 30  # characters; longer names of methods would leave no room for the axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkCheck:
    """A comparison of a composed time to the target with a whole run on the link, for the same method and seed.

    A composed time is the number of steps times their measured duration.

    Attributes:
        method: name of the method.
        seed: the seed.
        composed_s: seconds to the target, composed of step times measured right before and after the whole run.
        measured_s: measured seconds to the target.
        is_same_training: True if the trainings with and without the link had the same test losses, bit for bit.
        other_cpu_share: share of the cores' time that other programs took, from 0 to 1: the largest of the whole run
            and the two jobs that timed steps; None if unknown.
        run_id: folder name of the whole run.
    """

    method: str
    seed: int
    composed_s: float
    measured_s: float
    is_same_training: bool
    other_cpu_share: float | None = None
    run_id: str = ""

    @property
    def deviation(self) -> float:
        """The relative error of the composed time: composed / measured - 1."""
        return self.composed_s / self.measured_s - 1.0

    @property
    def is_passed(self) -> bool:
        """True if the check passed, so that composed times can be used."""
        return self.is_same_training and abs(self.deviation) <= LARGEST_DEVIATION

    @property
    def is_disturbed(self) -> bool:
        """True if the check failed on a busy machine, so that it says nothing about composed times."""
        return self.is_same_training and not self.is_passed and is_busy(self.other_cpu_share)


def failed_under_load(checks: Sequence[LinkCheck]) -> bool:
    """Return True if a check failed, and every check that failed did so on a busy machine."""
    failed = [check for check in checks if not check.is_passed]
    return bool(failed) and all(check.is_disturbed for check in failed)


def judge(evidence: Sequence[Evidence], rule: DecideConfig, checks: Sequence[LinkCheck]) -> list[MethodDecision]:
    """Return the decision about each method; if a check failed on a busy machine, all but missed targets are open.

    Args:
        evidence: the measurements of the baseline, then those of the methods.
        rule: the rule of the decision.
        checks: the whole runs that checked composed times.
    """
    baseline, *candidates = evidence
    decisions = [decide(baseline, each, rule, len(candidates)) for each in candidates]
    if not failed_under_load(checks):
        return decisions
    return [each if each.verdict == "missed" else dataclasses.replace(each, verdict="open") for each in decisions]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Answer:
    """The answer of `bench.decide`, with the measurements that led to it; printing it shows the answer in sentences.

    Attributes:
        folder: the study's folder, with ``decision.json`` and everything that was measured.
        study: the study.
        target: test accuracy to reach, from 0 to 1; or bits per byte of a text.
        rule: the rule by which methods were compared.
        evidence: the measurements of each method, the baseline first.
        decisions: the decision about each method except the baseline.
        checks: whole runs on the link, if any.
        faster_up_to: for each method that is faster on this link, the highest rate of the link in bit/s at which the
            method is still faster; infinity if it is faster at all tried rates. Methods without a known rate are
            missing.
        rates_tried: rates of the link in bit/s at which steps were timed, from low to high.
        stopped: the reason why undecided methods got no further seeds; empty if all methods are decided.
        next_seed_s: seconds that one more seed of all undecided methods would take; None if unknown.
        warnings: sentences about results that should not be trusted.
        needs_idle_machine: True if methods are open because steps or a check were timed on a busy machine.
        load: what other programs took of the cores.
    """

    folder: Path
    study: Study
    target: float
    rule: DecideConfig
    evidence: list[Evidence]
    decisions: list[MethodDecision]
    checks: list[LinkCheck]
    faster_up_to: dict[str, float]
    rates_tried: list[float]
    stopped: str
    next_seed_s: float | None
    warnings: list[str]
    needs_idle_machine: bool = False
    load: Load = dataclasses.field(default_factory=Load)

    def __str__(self) -> str:
        """Return the answer in sentences, and below them the warnings."""
        return "\n".join([*self.sentences, *(f"warning: {sentence}" for sentence in self.warnings)])

    def _repr_html_(self) -> str:
        return "\n".join([*(f"<p>{html.escape(line)}</p>" for line in str(self).splitlines()), self.methods.to_html()])

    @property
    def baseline(self) -> Evidence:
        """The measurements of the baseline."""
        return self.evidence[0]

    @property
    def methods(self) -> pd.DataFrame:
        """One row per method except the baseline: verdict, factor with its interval, and change of accuracy.

        For a text, the change of bits per byte replaces the change of accuracy.
        """
        rows = self.to_dict()["decisions"]
        types = {"method": str, "num_seeds": int, "num_missed": int}
        return frame(rows, {name: str if name.endswith("verdict") else types.get(name, float) for name in rows[0]})

    @property
    def sentences(self) -> list[str]:
        """The answer in a few sentences, the first of which starts with Yes, No or Open."""
        baseline, quality = self.baseline.method, self.baseline.quality
        target = quality.in_words(self.target) + (f" {quality.noun}" if quality.is_share else "")
        still_open = [each for each in self.decisions if each.verdict == "open"]
        best = best_of(self.decisions)
        if best.verdict == "faster":
            head = f"Yes, but worse in {quality.noun}" if best.accuracy_verdict == quality.beyond else "Yes"
            margin = f"{best.accuracy_verdict} the margin" if best.accuracy_verdict != "open" else "still open"
            change = f"final {quality.noun} {format_effect(best.accuracy, format_points)} {quality.unit}"
            first = (
                f"{head}: {best.method} reaches {target} {factor_of(best)} sooner than {baseline} on this link, "
                f"decided after {seeds_in_words(best.num_seeds)}; {change}, "
                f"{margin}."
            )
        elif still_open:
            reached = f"reaches {target} {factor_of(best)} as soon as {baseline}"
            missed = f"missed {target} so far"
            first = (
                f"Open: {best.method} {reached if best.factor else missed} on this link, not decided after "
                f"{seeds_in_words(best.num_seeds)}."
            )
        else:
            first = f"No: no method reaches {target} sooner than {baseline} on this link."
        found = [first]
        if self.stopped and still_open:
            cost = f", at about {format_seconds(self.next_seed_s)} per further seed" if self.next_seed_s else ""
            found.append(f"Open {self.stopped}: {', '.join(each.method for each in still_open)}{cost}.")
        are_composed = self.baseline.step_times is not None
        if not self.checks and are_composed:
            found.append("Times are composed of step times; no whole run on this link has checked them.")
        elif worst := max(self.checks, key=lambda each: (not each.is_same_training, abs(each.deviation)), default=None):
            other = "" if worst.is_same_training else ", and its test losses differ from those without the link"
            used = "" if are_composed else f"{other}, so whole runs of all methods count instead"
            if worst.is_disturbed and worst.other_cpu_share:
                used += f", while other programs took up to {worst.other_cpu_share:.0%} of the cores"
            found.append(
                f"Check: a whole run of {worst.method} on the link took {format_seconds(worst.measured_s)}, and the "
                f"time composed of step times is {format_seconds(worst.composed_s)} ({worst.deviation:+.1%}){used}."
            )
        if self.needs_idle_machine:
            found.append(
                f"To decide, run the same command with --out {self.folder} when the machine is idle: it keeps all "
                "seeds, and measures the step times and the check again."
            )
        times = self.baseline.times
        if missed_seeds := sum(not each.reached for each in times):
            found.append(
                f"The baseline missed the target with {missed_seeds} of {seeds_in_words(len(times))} (left out of the "
                "factors)."
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``decision.json``; unknown bounds of intervals are None."""
        return {
            "answer": self.sentences,
            self.baseline.quality.target_column: self.target,
            "rule": {name: getattr(self.rule, name) for name in RULE_OPTIONS},
            "base": self.study.base,
            "methods": self.study.methods,
            "decisions": [_flat(each, self.baseline.quality.name) for each in self.decisions],
            "checks": [dataclasses.asdict(each) | {"deviation": each.deviation} for each in self.checks],
            "other_cpu_share": dataclasses.asdict(self.load),
            "needs_idle_machine": self.needs_idle_machine,
            "faster_up_to_bps": {
                method: rate if rate < math.inf else None for method, rate in self.faster_up_to.items()
            },
            "rates_tried_bps": self.rates_tried,
            "stopped": self.stopped,
            "warnings": self.warnings,
        }

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of ``decision.csv``, one per method and seed.

        A row holds the number of steps, the mean time of a step, and their product, the training time.
        """
        trained = {(e.method, each.seed): each for e in self.evidence for each in e.trajectories}
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
            for evidence in self.evidence
            for each in evidence.times
        ]

    @property
    def question(self) -> str:
        """The time that is compared, the training and its link, such as ``Time to 90 % accuracy, ...``."""
        quality, (model, dataset) = self.baseline.quality, self.workload
        noun = f" {quality.noun}" if quality.is_share else ""
        return (
            f"Time to {quality.in_words(self.target)}{noun} against {self.baseline.method}: "
            f"{model} on {dataset}, {link_in_words(self.study.base)}"
        )

    @property
    def workload(self) -> tuple[str, str]:
        """The model and the data set, without their options."""
        run = self.baseline.trajectories[0].run
        return tuple(run[name].partition(":")[0] for name in ("model", "dataset"))

    def picture(self) -> Picture:
        """Return a picture of each method's factor of time with its interval; each dot is one seed."""
        from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator  # takes long to import

        names = [wrapped(f"{each.method}: {each.verdict}", _NAME_WIDTH) for each in self.decisions]
        longest = max(len(line) for name in names for line in name.split("\n"))
        title = wrapped(self.question, TITLE_WIDTH - longest)  # it begins right of the names
        figure, (axes,) = new_figure(
            height=0.9 + 0.15 * title.count("\n") + sum(0.3 + 0.15 * (1 + name.count("\n")) for name in names),
            width=WIDTH_IN,
            title=title,
        )
        same = f"within {format_number(self.rule.same)}x: same time"
        handles: dict[str, Any] = {}
        for place, (evidence, decision) in enumerate(zip(self.evidence[1:], self.decisions, strict=True)):
            ratios = [math.exp(each) for each in log_ratios(self.baseline.times, evidence.times)]
            if len(ratios) != 1 or decision.factor is None:
                handles["one seed"] = axes.scatter(ratios, [place] * len(ratios), color="0.6", s=14, zorder=2)
            if decision.factor is not None:
                mean = (decision.factor.value, decision.factor.low, decision.factor.high)
                is_bounded = decision.factor.low is not None
                what = "mean, with its interval" if is_bounded else "mean" if len(ratios) > 1 else "one seed"
                handles[what] = axes.errorbar(
                    mean[0],
                    place,
                    xerr=whiskers([mean]) if is_bounded else None,
                    fmt="o",
                    color=PALETTE[1 + place % (len(PALETTE) - 1)],
                    capsize=3,
                    zorder=3,
                )
        axes.axvline(1.0, color="0.3", linewidth=0.8)
        handles[same] = axes.axvspan(1 / self.rule.same, self.rule.same, color=BAND, zorder=0)
        axes.set(xscale="log", yticks=range(len(names)), yticklabels=names, ylim=(len(names) - 0.5, -0.5))
        axes.set_xlabel(wrapped(f"times sooner than {self.baseline.method} (below 1: later)", TITLE_WIDTH))
        low, high = axes.get_xlim()
        steps = next((steps for factor, steps in _TICKS if high > factor * low), None)
        axes.xaxis.set_major_locator(LogLocator(subs=steps) if steps else MaxNLocator(6))
        axes.xaxis.set_minor_locator(NullLocator())
        write_ticks(axes, "x")
        return with_legend(figure, handles, " ".join([f"{self.question}.", *self.sentences]))


def link_in_words(base: Mapping[str, Any]) -> str:
    """Return the link that the options of a study describe, such as ``2 hosts, 10 Mbit/s``."""
    given = {name: value for name, value in base.items() if name in LINK_OPTIONS and value is not None}
    hosts = given.pop("hosts", None)
    parts = [f"{hosts} hosts"] if hosts else []
    for name, value in given.items():
        text = format_rate(parse_rate(value)) if name in ("bandwidth", "uplink", "downlink") else str(value)
        parts.append(text if name == "bandwidth" else f"{name.replace('_', ' ')} {text}")
    return ", ".join(parts) or "on this machine's loopback"


def factor_of(decision: MethodDecision) -> str:
    """Return the factor of time with its bounds, if they are known, such as ``1.31x [1.22, 1.40]``."""
    return format_effect(decision.factor, format_factor, "x")


def _flat(decision: MethodDecision, quality: str) -> dict[str, Any]:
    # Return the values by name. The bounds of the factor are `low` and `high`; those of quality are `accuracy_low`, ...
    found: dict[str, Any] = {}
    for name, value in vars(decision).items():
        key = name.replace("accuracy", quality)
        if name in ("factor", "accuracy"):
            known = (value.value, value.low, value.high) if value else (None, None, None)
            prefix = "" if name == "factor" else f"{key}_"
            found |= zip((key, f"{prefix}low", f"{prefix}high"), known, strict=True)
        else:
            found[key] = value
    return found
