"""Compare every configuration with one baseline, with a verdict on speed and one on accuracy.

The direction is always from baseline to candidate: a factor above 1 means that the candidate is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from bench.core.errors import UsageError
from bench.core.schema.column import Column
from bench.report.configurations import SETTINGS, Configuration, configurations, find_column, find_metric
from bench.report.selection import Condition, in_order_of, select
from bench.report.statistics import Effect, Significance, difference, holm, improvement, judge
from bench.report.store import Repeat, Run, collect_runs, one_per_seed
from bench.report.store import Row as Evaluation
from bench.report.targets import TO_TARGET, Need, Target, common_budget, find_target, gain, needs, num_reached


class NoSuchBaseline(UsageError):
    """No row matches the baseline that the user named."""


# How a configuration can be named, the most exact way first.
_MATCHES: tuple[Callable[[Configuration, str], bool], ...] = (
    lambda row, text: text in row.distinct("compressor"),
    lambda row, text: text in {f"{a}+{b}" for a, b in _specs(row)},
    lambda row, text: text in row.distinct("name"),
    lambda row, text: text in row.distinct("config_id"),
    lambda row, text: text == row.title or text in map(str, row.label.values()),
    lambda row, text: text in map(_bare, row.distinct("compressor")),
    lambda row, text: text in {f"{_bare(a)}+{_bare(b)}" for a, b in _specs(row)},
)


def choose(
    rows: Sequence[Configuration], wanted: str | None, defaults: Sequence[str] = ("none",)
) -> tuple[Configuration, str | None]:
    """Choose the baseline of a comparison.

    If several rows match, those with a successful run come first, then those on the collective ``native``, then the
    order of appearance decides.

    Args:
        rows: the configurations, in order of appearance; at least one.
        wanted: a compressor, ``compressor+collective``, a run's name or a label's value. An exact spec takes precedence
            over a component's name without options. None: the first default that has a successful run.
        defaults: compressors to choose from if ``wanted`` is None, the preferred one first.

    Returns:
        The baseline, and a sentence for the user if several rows match or no default does; otherwise None.

    Raises:
        NoSuchBaseline: no row matches ``wanted``; the message lists the rows.
    """
    if wanted is None:
        fit = [row for row in rows if row.ok] or rows
        for compressor in defaults:
            if dense := [row for row in fit if row.distinct("compressor") == [compressor]]:
                chosen = _preferred(dense)
                others = (
                    f"{len(dense)} rows use {compressor}; the baseline is {chosen.title} (--baseline chooses another)"
                )
                return chosen, others if len(dense) > 1 else None
        said = f"no row uses {' or '.join(defaults)}, so the baseline is {fit[0].title} (--baseline chooses another)"
        return fit[0], said if len(fit) > 1 else None
    for matches in _MATCHES:
        fitting = [row for row in rows if matches(row, wanted)]
        if fitting:
            chosen = _preferred(fitting)
            if len(fitting) == 1:
                return chosen, None
            return chosen, f"{len(fitting)} rows fit --baseline {wanted}; the baseline is {chosen.title}"
    raise NoSuchBaseline(f"no row fits --baseline {wanted}; the rows are: {'; '.join(row.title for row in rows)}")


def _preferred(rows: Sequence[Configuration]) -> Configuration:
    fit = [row for row in rows if row.ok] or rows
    return next((row for row in fit if row.distinct("collective") == ["native"]), fit[0])


def _bare(spec: str) -> str:
    return spec.partition(":")[0]


def _specs(row: Configuration) -> set[tuple[str, str]]:
    return {(run["compressor"], run["collective"]) for run in row.runs}


SAME_FACTOR = (1 / 1.05, 1.05)  # factors in this range make no practical difference
SAME_ACCURACY = (-0.01, 0.01)  # differences of accuracy, as shares, in this range make no practical difference

_FP32, _BF16 = ("none",), ("bf16", "torch_bf16")
BASELINES = (*_FP32, *_BF16)  # the default baselines, the preferred one first
BASELINES_OF_SPEED = (*_BF16, *_FP32)  # for speed bf16 comes first: it costs nothing, so fp32 would flatter the others

CPU = "cpu_s_per_step"
_OF_A_STEP = ("samples_per_s", "step_time_s", "step_time_p95_s")

Verdict = Literal["baseline", "faster", "slower", "better", "worse", "higher", "lower", "same", "unclear", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The comparison of a candidate with the baseline in one quantity.

    Attributes:
        effect: a factor by which the candidate is better, or a difference of accuracy as a share; None if either side
            has no value.
        p: the effect's p-value, adjusted for the number of candidates and targets.
        verdict: the conclusion that the seeds allow.
        held_back: True if the verdict is "unclear" because seeds missed the target or diverged; more seeds would not
            change that.
    """

    effect: Effect | None = None
    p: float | None = None
    verdict: Verdict
    held_back: bool = False

    def held_back_if(self, condition: bool) -> Finding:
        """Return this finding, with the verdict "unclear" if the condition is true."""
        return dataclasses.replace(self, verdict="unclear", held_back=True) if condition else self


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration, compared with the baseline.

    Attributes:
        gain: finding in the metric of the comparison.
        accuracy: finding in test accuracy.
        cpu: finding in CPU time per step, which other work on the machine affects less; only for speeds of a step.
        further: findings in the metric for every target after the first.
    """

    configuration: Configuration
    gain: Finding
    accuracy: Finding
    cpu: Finding
    further: list[Finding]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the metric of the comparison."""
        return self.gain.verdict

    @property
    def only_wall_clock_is_noisy(self) -> bool:
        """True if CPU time allows a verdict but the wall clock does not."""
        return self.verdict == "unclear" and self.cpu.effect is not None and self.cpu.verdict != "unclear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A baseline and the configurations compared with it.

    Attributes:
        metric: the column that the verdict is about.
        by: the columns that runs are grouped by; empty for ``config_id``.
        targets: accuracies to reach, at least one; the verdict is about the first.
        rows: the baseline first, then the candidates.
        unfinished: runs that were stopped or are still running, if no other run of their seed finished. No row
            contains them, unless no run finished at all.
        repeats: seeds that were run more than once.
        ambiguity: a sentence for the user if several rows match ``--baseline``.
    """

    metric: Column
    by: tuple[str, ...]
    targets: list[Target]
    rows: list[Row]
    unfinished: list[Run]
    repeats: list[Repeat]
    ambiguity: str | None

    @property
    def baseline(self) -> Configuration:
        """The configuration that the others are compared with."""
        return self.rows[0].configuration

    @property
    def without_row(self) -> list[Run]:
        """The unfinished runs whose configurations have no row."""
        keys = self.by or ("config_id",)
        shown = {tuple(run[key] for key in keys) for row in self.rows for run in row.configuration.runs}
        return [run for run in self.unfinished if tuple(run[key] for key in keys) not in shown]

    @property
    def candidates(self) -> list[Row]:
        """All rows except the baseline."""
        return self.rows[1:]

    @property
    def is_about_speed(self) -> bool:
        """True if the verdict is "faster" or "slower", not "better" or "worse"."""
        return _is_speed(self.metric)

    @property
    def is_to_target(self) -> bool:
        """True if the metric is a time or a number of bytes until the target."""
        return self.metric.name in TO_TARGET


def compare(
    rows: Sequence[Evaluation],
    *,
    baseline: str | None = None,
    metric: str = "samples_per_s",
    by: Sequence[str] = (),
    where: Sequence[Condition] = (),
    targets: Sequence[str] = (),
    sort: str | None = None,
) -> Comparison:
    """Compare every configuration with one baseline.

    Args:
        rows: rows as returned by ``store.read``; not changed.
        baseline: the name of the baseline (``baseline.choose``); None: the row without compression, or else the one in
            bf16; for speeds bf16 comes first.
        metric: the column that the verdict is about.
        by: columns to group by instead of ``config_id``.
        where: conditions that the runs must meet.
        targets: accuracies to reach (``targets.find_target``); empty: the target that each run was given.
        sort: the column that orders the candidates, the best first; None: order of appearance.

    Raises:
        UsageError: a column is unknown, nothing matches the baseline or a condition, or no finished run has the metric.
    """
    column = find_metric(metric)
    by = [find_column(name).name for name in by]
    selected = select(collect_runs(rows), where)
    runs = [run for run in selected if not run.unfinished] or selected
    seeds = {(run["config_id"], run["seed"]) for run in runs}
    unfinished = [run for run in selected if (run["config_id"], run["seed"]) not in seeds]
    # With --by, compare the settings themselves: another version of the code may have given them another config_id.
    runs, repeats = one_per_seed(runs, (*by, *SETTINGS)) if by else one_per_seed(runs)
    groups = configurations(runs, by)
    chosen, ambiguity = choose(groups, baseline, BASELINES_OF_SPEED if _is_speed(column) else BASELINES)
    to_reach = [find_target(text, chosen) for text in targets] or [Target()]
    _check_measured(column, groups, to_reach[0])
    candidates = [group for group in groups if group is not chosen]
    return Comparison(
        metric=column,
        by=tuple(by),
        targets=to_reach,
        unfinished=unfinished,
        rows=[_baseline_row(chosen), *_rows(chosen, in_order_of(sort, candidates, to_reach[0]), column, to_reach)],
        repeats=repeats,
        ambiguity=ambiguity,
    )


def _check_measured(metric: Column, groups: Sequence[Configuration], target: Target) -> None:
    finished = [group for group in groups if group.ok]
    if metric.name in TO_TARGET:
        measured = any(needs(group, metric.name, target) for group in finished)
    else:
        measured = any(group.values(metric.name) for group in finished)
    if finished and not measured:
        raise UsageError(f"no finished run has a value in {metric.name}; choose another --metric")


def _baseline_row(baseline: Configuration) -> Row:
    finding = Finding(verdict="baseline" if baseline.ok else "failed")
    return Row(configuration=baseline, gain=finding, accuracy=finding, cpu=finding, further=[])


def _rows(
    baseline: Configuration, candidates: Sequence[Configuration], metric: Column, to_reach: Sequence[Target]
) -> list[Row]:
    first, *others = to_reach
    accuracy = _accuracy_findings(baseline, candidates)
    gains = accuracy if metric.name == "test_accuracy" else _gains(baseline, candidates, metric, first, len(to_reach))
    further = [_gains(baseline, candidates, metric, target, len(to_reach)) for target in others]
    cpu = _cpu_findings(baseline, candidates, metric)
    return [
        Row(
            configuration=candidate,
            gain=gains[i],
            accuracy=accuracy[i],
            cpu=cpu[i],
            further=[findings[i] for findings in further],
        )
        for i, candidate in enumerate(candidates)
    ]


def _accuracy_findings(baseline: Configuration, candidates: Sequence[Configuration]) -> list[Finding]:
    known = baseline.values("test_accuracy")
    effects = [difference(known, candidate.values("test_accuracy")) for candidate in candidates]
    findings = _findings(candidates, effects, same=SAME_ACCURACY, words=("higher", "lower"))
    return [
        finding.held_back_if(_divergence_forbids(finding.verdict, baseline, each))
        for finding, each in zip(findings, candidates, strict=True)
    ]


def _divergence_forbids(verdict: Verdict, baseline: Configuration, candidate: Configuration) -> bool:
    """Return True if a verdict on accuracy would ignore that the side it favours diverged more often."""
    if verdict == "lower":
        return diverges_more_often(baseline, candidate)
    return verdict in ("same", "higher") and diverges_more_often(candidate, baseline)


def diverges_more_often(candidate: Configuration, baseline: Configuration) -> bool:
    """Return True if a larger share of the candidate's seeds diverged."""
    mine, theirs = ((len(each.diverged), len(each.ok) + len(each.diverged)) for each in (candidate, baseline))
    return mine[0] * theirs[1] > theirs[0] * mine[1]


def _cpu_findings(baseline: Configuration, candidates: Sequence[Configuration], metric: Column) -> list[Finding]:
    known = baseline.values(CPU) if metric.name in _OF_A_STEP else []
    effects = [improvement(known, candidate.values(CPU), higher_is_better=False) for candidate in candidates]
    return _findings(candidates, effects, same=SAME_FACTOR, words=("faster", "slower"))


def _gains(
    baseline: Configuration, candidates: Sequence[Configuration], metric: Column, target: Target, tables: int
) -> list[Finding]:
    words: tuple[Verdict, Verdict] = ("faster", "slower") if _is_speed(metric) else ("better", "worse")
    if metric.name not in TO_TARGET:
        known, higher = baseline.values(metric.name), metric.better == "higher"
        counted = metric.group == "wire" and metric.deterministic
        effects = [
            improvement(known, each.values(metric.name), higher_is_better=higher, counted=counted)
            for each in candidates
        ]
        return _findings(candidates, effects, same=SAME_FACTOR, words=words)
    theirs = needs(baseline, metric.name, target)
    ours = [needs(candidate, metric.name, target) for candidate in candidates]
    effects = [gain(theirs, each) for each in ours]
    findings = _findings(candidates, effects, same=SAME_FACTOR, words=words, tables=tables)
    return [
        finding.held_back_if(_misses_forbid(finding.verdict, theirs, each))
        for finding, each in zip(findings, ours, strict=True)
    ]


def _misses_forbid(verdict: Verdict, theirs: Sequence[Need], ours: Sequence[Need]) -> bool:
    """Return True if a verdict would reward a side for missing the target.

    If the better side reached the target less often, it may only have had the smaller budget. And sides that look the
    same up to the common budget are not the same if one of them needs more than that more often.
    """
    if verdict == "same":
        budget = common_budget(theirs, ours)
        return num_reached(theirs, budget) * len(ours) != num_reached(ours, budget) * len(theirs)
    more_often = num_reached(ours) * len(theirs) - num_reached(theirs) * len(ours)
    return (verdict in ("faster", "better") and more_often < 0) or (verdict in ("slower", "worse") and more_often > 0)


def _findings(
    candidates: Sequence[Configuration],
    effects: Sequence[Effect | None],
    *,
    same: tuple[float, float],
    words: tuple[Verdict, Verdict],
    tables: int = 1,
) -> list[Finding]:
    p_values = holm([effect.p if effect else None for effect in effects], tables=tables)
    return [
        Finding(effect=effect, p=p, verdict=_say(effect, p, same, words) if candidate.ok else "failed")
        for candidate, effect, p in zip(candidates, effects, p_values, strict=True)
    ]


def _say(effect: Effect | None, p: float | None, same: tuple[float, float], words: tuple[Verdict, Verdict]) -> Verdict:
    said: Significance = judge(effect, same=same, p=p) if effect else "unclear"
    verdicts: dict[Significance, Verdict] = {"above": words[0], "below": words[1], "same": "same", "unclear": "unclear"}
    return verdicts[said]


def _is_speed(metric: Column) -> bool:
    return metric.unit in ("s", "samples/s")
