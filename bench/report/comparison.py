"""Compare every configuration with one baseline: give a verdict on the chosen metric, and one on model quality.

Every factor compares a candidate with the baseline: above 1, the candidate is better.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from bench.core.columns import Column
from bench.core.errors import UsageError
from bench.report.anytime import Conclusion
from bench.report.baseline import BASELINES, BASELINES_OF_SPEED, choose_baseline
from bench.report.columns import COLUMNS_BY_NAME, find_column, find_metric
from bench.report.groups import SETTINGS, Condition, RunGroup, group_runs, select
from bench.report.quality import SAME_CHANGE, Metric
from bench.report.statistics import Effect, SeedRule, holm, improvement, judge
from bench.report.store import Row, Run, collect_runs, one_per_seed
from bench.report.targets import (
    TO_TARGET,
    Need,
    Target,
    common_budget,
    find_target,
    gain,
    mean_need,
    needs,
    num_reached,
)

SAME_FACTOR = (1 / 1.05, 1.05)  # factors in this range make no practical difference

CPU = "cpu_s_per_step"
_OF_A_STEP = ("samples_per_s", "step_time_s", "step_time_p95_s")
_SPEED_UNITS = ("s", "samples/s")

ComparisonVerdict = Literal[
    "baseline", "faster", "slower", "better", "worse", "higher", "lower", "same", "unclear", "failed"
]
# (verdict on an effect above the range of "same", verdict on an effect below this range)
_Words = tuple[ComparisonVerdict, ComparisonVerdict]
BETTER, WORSE = ("faster", "better", "higher"), ("slower", "worse", "lower")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of comparing a candidate with the baseline in one quantity, such as speed or accuracy.

    Attributes:
        effect: the factor by which the candidate is better or, for the quality of the models, the change from baseline
            to candidate as `Metric` defines it; None if either side has no value.
        p: p-value of the effect, adjusted for the number of candidates and targets; None if the effect cannot be
            tested.
        verdict: the conclusion that the seeds allow.
        held_back: True if the verdict is "unclear" because seeds missed the target or diverged, so that more seeds
            would not make it clear.
    """

    effect: Effect | None = None
    p: float | None = None
    verdict: ComparisonVerdict
    held_back: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComparedRow:
    """One row of a comparison: a group of runs, and how it differs from the baseline.

    Attributes:
        group: the runs of this row.
        gain: the difference in the metric of the comparison; if the metric depends on a target, with the first target.
        accuracy: the difference in model quality: in test accuracy or, for a text, in bits per byte.
        cpu: the difference in CPU time per step, which other programs on the machine affect less than the wall clock.
            This finding has no `effect` unless the metric is the speed or the duration of a step.
        further: the difference in the metric with each further target.
    """

    group: RunGroup
    gain: Finding
    accuracy: Finding
    cpu: Finding
    further: list[Finding]

    @property
    def only_wall_clock_is_noisy(self) -> bool:
        """True if CPU time per step allows a verdict, but the metric, which is measured by the wall clock, does not."""
        return self.gain.verdict == "unclear" and self.cpu.effect is not None and self.cpu.verdict != "unclear"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """A baseline and the configurations that are compared with it.

    Attributes:
        metric: the column that the verdict is about.
        by: the columns that runs are grouped by; empty if they are grouped by ``config_id``.
        targets: values to reach, at least one; the verdict is about the first.
        quality: the measure of the baseline's models: accuracy, or bits per byte. Rows whose models have another
            measure are not compared in quality.
        rows: the baseline first, then the candidates.
        unfinished: stopped or running runs of configurations and seeds of which no run finished; no row contains
            these runs. If no run finished at all, the rows contain the unfinished runs, and this list is empty.
        repeated: those runs in the rows that were chosen from several runs of the same configuration and seed.
        ambiguity: a sentence for the user if the choice of the baseline was not clear, for example because several rows
            match ``--baseline``; otherwise None.
        rule: how the number of seeds was chosen, "fixed" or "anytime"; the tests behind the verdicts depend on it.
    """

    metric: Column
    by: tuple[str, ...]
    targets: list[Target]
    quality: Metric
    rows: list[ComparedRow]
    unfinished: list[Run]
    repeated: list[Run]
    ambiguity: str | None
    rule: SeedRule = "fixed"

    @property
    def groups(self) -> list[RunGroup]:
        """The groups of runs of all rows, in the order of the rows."""
        return [row.group for row in self.rows]

    def renamed(self, names: Mapping[str, str]) -> "Comparison":
        """Return this comparison with new short names of its rows; `names` gives one for each ``config_id``."""
        rows = [
            dataclasses.replace(row, group=dataclasses.replace(row.group, short=names[row.group.runs[0]["config_id"]]))
            for row in self.rows
        ]
        return dataclasses.replace(self, rows=rows)

    @property
    def baseline(self) -> RunGroup:
        """The group of runs that the candidates are compared with."""
        return self.rows[0].group

    @property
    def candidates(self) -> list[ComparedRow]:
        """All rows except the baseline."""
        return self.rows[1:]

    @property
    def is_about_speed(self) -> bool:
        """True if a clear verdict reads "faster" or "slower"; False if it reads "better" or "worse"."""
        return self.metric.unit in _SPEED_UNITS

    @property
    def is_about_quality(self) -> bool:
        """True if the metric is the quality of the models, which is compared by its change, not by a factor."""
        return self.metric.name == self.quality.column

    @property
    def is_to_target(self) -> bool:
        """True if the metric is the time or the number of bytes until the target."""
        return self.metric.name in TO_TARGET


def compare(
    rows: Sequence[Row],
    *,
    baseline: str | None = None,
    metric: str = "samples_per_s",
    by: Sequence[str] = (),
    where: Sequence[Condition] = (),
    targets: Sequence[str] = (),
    sort: str | None = None,
    rule: SeedRule = "fixed",
) -> Comparison:
    """Compare every configuration with one baseline.

    Args:
        rows: rows as returned by ``store.read``; not changed.
        baseline: the name of the baseline, as `choose_baseline` reads it. None chooses the row without compression or,
            if there is none, the row that sends bf16; if the metric is a speed, the row that sends bf16 is preferred.
        metric: the column that the verdict is about.
        by: columns to group by instead of ``config_id``.
        where: conditions that the runs must meet.
        targets: values to reach, as ``targets.find_target`` reads them; if empty, each run's own target.
        sort: the column that orders the candidates, the best first; None keeps the order of appearance.
        rule: "fixed" if the number of seeds was chosen before the first run; "anytime" if seeds were added until the
            result was clear. "anytime" compares only seeds that both rows have.

    Raises:
        UsageError: a column is unknown, no row matches the baseline, a target cannot be read, or no finished run has a
            value of the metric.
        NothingToCompare: no run meets the conditions.
    """
    column = find_metric(metric)
    by = [find_column(name).name for name in by]
    selected = select(collect_runs(rows), where)
    # A run that was stopped from outside, or is still running, says nothing about its method.
    runs = [run for run in selected if run["status"] not in ("interrupted", "running")] or selected
    seeds = {(run["config_id"], run["seed"]) for run in runs}
    # With --by, compare settings, not config_id, because another version of the code may give them another config_id.
    runs, repeated = one_per_seed(runs, (*by, *SETTINGS)) if by else one_per_seed(runs)
    groups = group_runs(runs, by)
    chosen, ambiguity = choose_baseline(
        groups, baseline, BASELINES_OF_SPEED if column.unit in _SPEED_UNITS else BASELINES
    )
    quality = chosen.quality
    to_reach = [find_target(text, chosen, quality) for text in targets] or [Target()]
    finished = [group for group in groups if group.ok]
    if finished and not any(
        needs(group, metric, to_reach[0]) if metric in TO_TARGET else group.values(metric) for group in finished
    ):
        raise UsageError(f"no finished run has a value in {metric}; choose another --metric")
    itself = Finding(verdict="baseline" if chosen.ok else "failed")
    candidates = in_order_of(sort, [group for group in groups if group is not chosen], to_reach[0])
    further = [Finding(verdict="baseline")] * (len(to_reach) - 1)
    return Comparison(
        metric=column,
        by=tuple(by),
        targets=to_reach,
        quality=quality,
        unfinished=[run for run in selected if (run["config_id"], run["seed"]) not in seeds],
        rows=[
            ComparedRow(group=chosen, gain=itself, accuracy=itself, cpu=itself, further=further),
            *_compared(chosen, candidates, column, quality, to_reach, rule),
        ],
        repeated=repeated,
        ambiguity=ambiguity,
        rule=rule,
    )


def in_order_of(name: str | None, candidates: Sequence[RunGroup], target: Target) -> list[RunGroup]:
    """Sort the candidates by a column.

    The best values come first; if neither higher nor lower values are better, the lowest come first. Candidates without
    a value come last. If the column is the time or the bytes to target, candidates are first sorted by the share of
    seeds that missed the target.

    Args:
        name: name of the column; None keeps the order.
        candidates: groups of runs.
        target: the value to reach.

    Raises:
        UsageError: there is no such column.
    """
    if name is None:
        return list(candidates)
    column = COLUMNS_BY_NAME.get(name) or find_column(name)
    sign = -1.0 if column.better == "higher" else 1.0

    def place(candidate: RunGroup) -> tuple[bool, Any]:
        if name in TO_TARGET:
            seeds = needs(candidate, name, target)
            mean = mean_need(seeds)
            return mean is None, (1 - num_reached(seeds) / len(seeds), mean.mean) if mean else None
        mean = candidate.estimate(name) if column.better else None
        value = sign * mean.mean if mean else next(iter(candidate.distinct(name)), None)
        return value is None, value

    return sorted(candidates, key=place)


def _compared(
    baseline: RunGroup,
    candidates: Sequence[RunGroup],
    metric: Column,
    quality: Metric,
    to_reach: Sequence[Target],
    rule: SeedRule,
) -> list[ComparedRow]:
    def divergence_forbids(verdict: ComparisonVerdict, number: int) -> bool:
        # A verdict on quality must not favour a side that diverged more often.
        if verdict in WORSE:
            return diverges_more_often(baseline, candidates[number])
        return verdict in ("same", *BETTER) and diverges_more_often(candidates[number], baseline)

    is_paired = rule == "anytime"
    changes = [
        quality.effect(*_values(baseline, each, quality.column, rule), paired=is_paired, rule=rule)
        if each.quality is quality or each.distinct("dataset") == baseline.distinct("dataset")
        else None
        for each in candidates
    ]
    of_quality: _Words = ("higher", "lower") if quality.higher_is_better else ("worse", "better")
    accuracy = _findings(candidates, changes, same=SAME_CHANGE, words=of_quality, forbids=divergence_forbids)
    first, *others = to_reach
    gains = (
        accuracy if metric.name == quality.column else _gains(baseline, candidates, metric, first, len(to_reach), rule)
    )
    further = [_gains(baseline, candidates, metric, target, len(to_reach), rule) for target in others]
    costs = [
        improvement(*_values(baseline, each, CPU, rule), higher_is_better=False, paired=is_paired, rule=rule)
        if metric.name in _OF_A_STEP
        else None
        for each in candidates
    ]
    cpu = _findings(candidates, costs, same=SAME_FACTOR, words=("faster", "slower"))
    return [
        ComparedRow(
            group=candidate,
            gain=gains[i],
            accuracy=accuracy[i],
            cpu=cpu[i],
            further=[findings[i] for findings in further],
        )
        for i, candidate in enumerate(candidates)
    ]


def _values(baseline: RunGroup, candidate: RunGroup, column: str, rule: SeedRule) -> tuple[list[float], list[float]]:
    # With the rule "anytime", only seeds that both sides have are compared, in the order of the seeds.
    if rule == "fixed":
        return baseline.values(column), candidate.values(column)
    theirs, ours = (
        {run["seed"]: float(run[column]) for run in side.runs_with(column)} for side in (baseline, candidate)
    )
    seeds = sorted(theirs.keys() & ours.keys())
    return [theirs[seed] for seed in seeds], [ours[seed] for seed in seeds]


def diverges_more_often(candidate: RunGroup, baseline: RunGroup) -> bool:
    """Return True if a larger share of seeds diverged for the candidate than for the baseline."""
    mine, theirs = ((len(each.diverged), len(each.ok) + len(each.diverged)) for each in (candidate, baseline))
    return mine[0] * theirs[1] > theirs[0] * mine[1]


def _gains(
    baseline: RunGroup, candidates: Sequence[RunGroup], metric: Column, target: Target, tables: int, rule: SeedRule
) -> list[Finding]:
    # Compare the candidates with the baseline in any metric except quality. ``tables`` is the number of targets.
    words: _Words = ("faster", "slower") if metric.unit in _SPEED_UNITS else ("better", "worse")
    if metric.name not in TO_TARGET:
        effects = [
            improvement(
                *_values(baseline, each, metric.name, rule),
                higher_is_better=metric.better == "higher",
                paired=rule == "anytime",
                counted=metric.group == "wire" and metric.deterministic,
                rule=rule,
            )
            for each in candidates
        ]
        return _findings(candidates, effects, same=SAME_FACTOR, words=words)
    theirs = needs(baseline, metric.name, target)
    ours = [needs(candidate, metric.name, target) for candidate in candidates]
    return _findings(
        candidates,
        [gain(theirs, each, rule) for each in ours],
        same=SAME_FACTOR,
        words=words,
        tables=tables,
        forbids=lambda verdict, number: _misses_forbid(verdict, theirs, ours[number]),
    )


def _misses_forbid(verdict: ComparisonVerdict, theirs: Sequence[Need], ours: Sequence[Need]) -> bool:
    # A verdict must not reward a side for missing the target. A side that looks better, but reached the target less
    # often, may only have had a smaller budget. Sides that look the same up to the common budget are not the same if
    # one of them exceeds this budget more often.
    if verdict == "same":
        budget = common_budget(theirs, ours)
        return num_reached(theirs, budget) * len(ours) != num_reached(ours, budget) * len(theirs)
    more_often = num_reached(ours) * len(theirs) - num_reached(theirs) * len(ours)
    return (verdict in ("faster", "better") and more_often < 0) or (verdict in ("slower", "worse") and more_often > 0)


def _findings(
    candidates: Sequence[RunGroup],
    effects: Sequence[Effect | None],
    *,
    same: tuple[float, float],
    words: _Words,
    tables: int = 1,
    forbids: Callable[[ComparisonVerdict, int], bool] = lambda verdict, number: False,
) -> list[Finding]:
    """Return how each candidate compares with the baseline, as one `Finding` per candidate.

    Args:
        candidates: groups of runs.
        effects: the effect of each candidate; None if the candidate or the baseline has no value.
        same: (lowest, highest) effect that makes no practical difference.
        words: the verdicts on an effect above ``same``, and on an effect below it.
        tables: number of targets for which the candidates are tested; p-values are adjusted for this number.
        forbids: called with a verdict and the index of a candidate; returns True if this candidate must not get this
            verdict. The verdict is then "unclear".
    """
    verdicts: dict[Conclusion, ComparisonVerdict] = {
        "above": words[0], "below": words[1], "same": "same", "unclear": "unclear",
    }  # fmt: skip
    findings = []
    p_values = holm([effect.p if effect else None for effect in effects], tables=tables)
    for number, (candidate, effect, p) in enumerate(zip(candidates, effects, p_values, strict=True)):
        verdict = verdicts[judge(effect, same=same, p=p) if effect else "unclear"] if candidate.ok else "failed"
        held_back = forbids(verdict, number)
        findings.append(Finding(effect=effect, p=p, verdict="unclear" if held_back else verdict, held_back=held_back))
    return findings
