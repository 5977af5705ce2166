"""Compute the seconds or bytes that each seed needed to reach a target, including seeds that missed it.

Source: P. Royston and M. K. B. Parmar, "Restricted mean survival time: an alternative to the hazard ratio", BMC Medical
Research Methodology 13 (2013).

A run that missed the target is censored at its budget: all the seconds or bytes that it spent. Baseline and candidate
are compared up to a common budget, the smallest budget of any of their seeds. Up to that budget, it is known how much
every seed needed. Kaplan-Meier's restricted mean is therefore the plain mean of these amounts, each limited to the
common budget.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from bench.core.errors import UsageError
from bench.report.columns import BYTES_TO_TARGET
from bench.report.groups import RunGroup
from bench.report.quality import ACCURACY, Metric, quality_of
from bench.report.statistics import Effect, MeanEstimate, SeedRule, estimate, improvement
from bench.report.store import Row, Run, interval_steps

TIME = "time_to_target_s"
BYTES = BYTES_TO_TARGET.name
TO_TARGET = (TIME, BYTES)  # the metrics that measure what a seed needs to reach its target

_BELOW_BEST = re.compile(r"best-([0-9]+(?:\.[0-9]+)?)")


@dataclasses.dataclass(frozen=True)
class Target:
    """A value of a metric to reach.

    Attributes:
        value: the value, such as an accuracy from 0 to 1; None if each run has its own target.
        quality: the metric that `value` belongs to; not used if `value` is None.
        meaning: for a target relative to the baseline, such as ``best-1``, a sentence that explains it; otherwise
            empty.
    """

    value: float | None = None
    quality: Metric = ACCURACY
    meaning: str = ""

    @property
    def title(self) -> str:
        """The target as headings of tables show it: ``97.5 %``, or ``target`` if each run has its own."""
        return "target" if self.value is None else self.quality.in_words(self.value)

    def of(self, run: Run) -> tuple[Metric, float | None]:
        """Return the metric and the value that a run has to reach.

        They are the metric and value of this target or, if this target has no value, of the run's own target. The
        returned value is None if the run has no target either.
        """
        if self.value is not None:
            return self.quality, self.value
        own = quality_of([run.last_known])
        return own, run.last_known.get(own.target_column)


def find_target(text: str, baseline: RunGroup, quality: Metric = ACCURACY) -> Target:
    """Return the target that the user wrote: ``0.9``, or ``best-1``.

    ``best-1`` is one percentage point below the mean final accuracy of the baseline, or one per cent above its mean
    final bits per byte.

    Raises:
        UsageError: the text has neither form, the value is not possible, or the text is relative to a baseline without
            a final value.
    """
    if match := _BELOW_BEST.fullmatch(text):
        best = baseline.estimate(quality.column)
        if best is None:
            raise UsageError(
                f"--target {text} is relative to the {quality.noun} of the baseline, but {baseline.title} has none; "
                "give a number"
            )
        share = float(match[1]) / 100.0
        value = best.mean + quality.cost(share) if quality.is_share else best.mean * (1.0 + quality.cost(share))
        meaning = (
            f"{text} is {quality.format(value)}: {quality.amount(match[1])} {quality.beyond} the mean final "
            f"{quality.noun} of {baseline.title}, {quality.format(best.mean)} over {best.n} seeds"
        )
        if not 0.0 < value <= quality.largest:
            raise UsageError(f"--target {meaning}; no training is needed to reach that, so subtract less")
        return Target(value, quality, meaning)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value <= quality.largest:
        most = f" and at most {quality.largest:g}" if quality.largest < math.inf else ""
        raise UsageError(
            f"'{text}' is not a target; write the {quality.noun} to reach, above 0{most}, or best-1: "
            f"{quality.amount('1')} {quality.beyond} the baseline"
        )
    return Target(value, quality)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """The seconds or bytes that one seed needed to reach the target.

    Attributes:
        seed: the seed of the run.
        amount: seconds of training or bytes sent until the target; None if the run missed the target.
        budget: seconds or bytes that the whole run spent; infinite for a diverged run; None if unknown.
    """

    seed: int
    amount: float | None
    budget: float | None


def needs(group: RunGroup, metric: str, target: Target) -> list[Need]:
    """Return the seconds or bytes that the runs of a group needed to reach the target, with one `Need` per run.

    Runs are left out if they neither succeeded nor diverged, if they have no target, or if the amount that they spent
    is unknown. A diverged run has an infinite budget, because it would have missed the target with any budget.

    Args:
        group: the runs.
        metric: `TIME` for seconds of training, or `BYTES` for bytes sent.
        target: the value to reach.
    """
    found = []
    for run in (*group.ok, *group.diverged):
        (quality, value), budget = target.of(run), math.inf if run.diverged else None
        rows = [row for row in run.rows if row[quality.column] is not None] if run.diverged else run.rows
        amounts = [row["train_time_s"] for row in rows] if metric == TIME else bytes_sent(rows)
        if value is not None and target.value is None and metric == TIME:  # the run recorded this time
            found.append(Need(seed=run["seed"], amount=run[TIME], budget=budget or run["train_time_s"]))
        elif value is not None and None not in amounts:
            pairs = zip(amounts, rows, strict=True)
            reached = [amount for amount, row in pairs if quality.reaches(row[quality.column], value)]
            found.append(Need(seed=run["seed"], amount=next(iter(reached), None), budget=budget or amounts[-1]))
    return found


def bytes_sent(rows: Sequence[Row]) -> list[float | None]:
    """Return the bytes of gradients and optimizer state that a rank had sent by each evaluation of a run.

    All values are None if any is unknown, for example after a resume with another number of ranks, which restarts the
    count of steps.

    Args:
        rows: the rows of the run, in order of writing.
    """
    numbers = interval_steps(rows)
    if None in numbers or any(row["payload_bytes_per_step"] is None for row in rows):
        return [None for _ in rows]
    return list(
        itertools.accumulate(
            number * (row["payload_bytes_per_step"] + (row["state_bytes_per_step"] or 0.0))
            for number, row in zip(numbers, rows, strict=True)
            if number is not None
        )
    )


def num_reached(seeds: Sequence[Need], budget: float = math.inf) -> int:
    """Return how many seeds reached the target with at most this budget in seconds or bytes."""
    return sum(need.amount is not None and need.amount <= budget for need in seeds)


def mean_need(seeds: Sequence[Need]) -> MeanEstimate | None:
    """Return the mean over seeds of the seconds or bytes to target.

    A seed that missed the target counts with its budget. A diverged seed, whose budget is infinite, counts with the
    largest finite amount of all seeds. If any seed missed the target, the mean is a lower bound and has no interval.

    Returns:
        None if there is no seed, if all seeds diverged, or if the amount that a seed spent is unknown.
    """
    spent = [need.budget if need.amount is None else need.amount for need in seeds]
    longest = max((amount for amount in spent if amount is not None and amount < math.inf), default=None)
    amounts = [longest if amount == math.inf else amount for amount in spent]
    known = estimate([amount for amount in amounts if amount is not None]) if None not in amounts else None
    if known is None or num_reached(seeds) == len(seeds):
        return known
    return dataclasses.replace(known, low=None, high=None)


def common_budget(baseline: Sequence[Need], candidate: Sequence[Need]) -> float:
    """Return the smallest budget of any seed of both sides, in seconds or bytes; infinity if all reached the target."""
    both = (*baseline, *candidate)
    has_missed = num_reached(both) < len(both)
    return min((need.budget for need in both if has_missed and need.budget is not None), default=math.inf)


def gain(baseline: Sequence[Need], candidate: Sequence[Need], rule: SeedRule = "fixed") -> Effect | None:
    """Return the factor by which the candidate needs fewer seconds or bytes to target than the baseline.

    Each seed's need is limited to the common budget. Needs are compared in pairs if both sides have the same seeds.

    Args:
        baseline: the needs of the baseline's seeds.
        candidate: the needs of the candidate's seeds.
        rule: "anytime" compares only seeds that both sides have, and stays valid if seeds are added until the result is
            clear.

    Returns:
        None if no seed of either side reached the target within the common budget, or if a seed that missed the target
        has an unknown budget.
    """
    sides = [sorted(side, key=lambda need: need.seed) for side in (baseline, candidate)]
    if rule == "anytime":
        common = {need.seed for need in baseline} & {need.seed for need in candidate}
        sides = [[need for need in side if need.seed in common] for side in sides]
    budget = common_budget(*sides)
    amounts = [[budget if need.amount is None else min(need.amount, budget) for need in side] for side in sides]
    is_unknown = any(need.amount is None and need.budget is None for side in sides for need in side)
    if is_unknown or all(amount == budget for side in amounts for amount in side):
        return None
    seeds, others = ([need.seed for need in side] for side in sides)
    are_pairs = seeds == others and len(set(seeds)) == len(seeds)
    return improvement(*amounts, higher_is_better=False, paired=are_pairs, rule=rule)
