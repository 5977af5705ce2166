"""Targets: what a seed needed until it reached an accuracy, in seconds or bytes; one that missed it needed more.

A missed target is censored at the run's budget. Source: P. Royston and M. K. B. Parmar, "Restricted mean survival time:
an alternative to the hazard ratio", BMC Medical Research Methodology 13 (2013): both sides are compared up to one
common budget, the smallest of any seed of either. Up to there every seed's need is known, so
Kaplan-Meier's restricted mean is the plain mean of what each seed needed, at most the budget.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

from bench.core.errors import UsageError
from bench.report.columns import BYTES_TO_TARGET
from bench.report.configurations import Configuration
from bench.report.formats import format_number
from bench.report.runs import Run, interval_steps
from bench.report.statistics import Effect, Estimate, estimate, improvement
from bench.report.store import Row

TIME = "time_to_target_s"
BYTES = BYTES_TO_TARGET.name
TO_TARGET = (TIME, BYTES)
"""Metrics that are what a seed needs until its target."""

_BELOW_BEST = re.compile(r"best-([0-9]+(?:\.[0-9]+)?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """An accuracy to reach.

    Attributes:
        accuracy: as a share; None: the one that each run was given.
        meaning: what a relative target is relative to, in a sentence; else empty.
    """

    accuracy: float | None = None
    meaning: str = ""

    @property
    def title(self) -> str:
        """``target``, or ``97.5 %``."""
        return "target" if self.accuracy is None else f"{format_number(self.accuracy * 100)} %"


def find_target(text: str, baseline: Configuration) -> Target:
    """Read ``0.9``, or ``best-1``: one point below the mean final accuracy of the baseline.

    Raises:
        UsageError: the text is neither, or the baseline has no accuracy.
    """
    if match := _BELOW_BEST.fullmatch(text):
        best = baseline.estimate("test_accuracy")
        if best is None:
            raise UsageError(f"--target {text} needs an accuracy of the baseline, {baseline.title}; give a number")
        accuracy = best.mean - float(match[1]) / 100.0
        meaning = (
            f"{text} is {accuracy:.2%}: {match[1]} {'point' if match[1] == '1' else 'points'} below the mean final "
            f"accuracy of {baseline.title}, "
            f"{best.mean:.2%} of {best.n} seeds"
        )
        if accuracy <= 0.0:
            raise UsageError(f"--target {meaning}, which every run has from the start; take fewer points")
        return Target(accuracy=accuracy, meaning=meaning)
    try:
        accuracy = float(text)
    except ValueError:
        accuracy = math.nan
    if not 0.0 < accuracy <= 1.0:
        raise UsageError(f"'{text}' is no target; write a share as 0.9, or best-1: one point below the baseline's best")
    return Target(accuracy=accuracy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """What one seed needed until its target.

    Attributes:
        amount: seconds or bytes; None: the target was missed.
        budget: what the run spent in all; None: not known.
    """

    seed: int
    amount: float | None
    budget: float | None

    def up_to(self, budget: float) -> float | None:
        """The amount, at most this budget; None where the target was missed with a smaller or unknown budget."""
        if self.amount is None and (self.budget is None or self.budget < budget):
            return None
        return budget if self.amount is None else min(self.amount, budget)


def needs(configuration: Configuration, metric: str, target: Target) -> list[Need]:
    """One per run that ended well or diverged, had a target, and of which is known what it spent until each evaluation.

    One that diverged would have missed its target with any budget.

    Args:
        configuration: whose runs.
        metric: ``TIME`` or ``BYTES``.
        target: what to reach.
    """
    counted = [*configuration.ok, *configuration.diverged]
    asked = [(run, target.accuracy or run["target_accuracy"]) for run in counted]
    found = (_need(run, metric, target, accuracy) for run, accuracy in asked if accuracy is not None)
    return [need for need in found if need is not None]


def _need(run: Run, metric: str, target: Target, accuracy: float) -> Need | None:
    rows = [row for row in run.rows if row["test_accuracy"] is not None] if run.diverged else run.rows
    budget = math.inf if run.diverged else None
    if target.accuracy is None and metric == TIME:
        return Need(seed=run["seed"], amount=run[TIME], budget=budget or run["train_time_s"])  # as the run found it
    amounts = [row["train_time_s"] for row in rows] if metric == TIME else bytes_sent(rows)
    if None in amounts:
        return None
    reached = (
        amount
        for amount, row in zip(amounts, rows, strict=True)
        if row["test_accuracy"] is not None and row["test_accuracy"] >= accuracy
    )
    return Need(seed=run["seed"], amount=next(reached, None), budget=budget or amounts[-1])


def bytes_sent(rows: Sequence[Row]) -> list[float | None]:
    """Bytes of gradients and optimizer state that a rank sent until each of a run's evaluations.

    None of all of them where any is not known, as after steps were counted anew, with other ranks.
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
    """How many seeds reached the target, within this budget."""
    return sum(need.amount is not None and need.amount <= budget for need in seeds)


def mean_need(seeds: Sequence[Need]) -> Estimate | None:
    """The mean over seeds, each that missed counted with its budget; then a lower bound, without an interval.

    One that diverged has no budget: it counts as the longest of all.
    """
    spent = [need.budget if need.amount is None else need.amount for need in seeds]
    longest = max((amount for amount in spent if amount is not None and amount < math.inf), default=None)
    amounts = [longest if amount == math.inf else amount for amount in spent]
    known = estimate([amount for amount in amounts if amount is not None]) if None not in amounts else None
    if known is None or num_reached(seeds) == len(seeds):
        return known
    return dataclasses.replace(known, low=None, high=None)


def common_budget(baseline: Sequence[Need], candidate: Sequence[Need]) -> float:
    """The smallest budget of both sides; infinite where all seeds reached the target, and no budget matters."""
    both = (*baseline, *candidate)
    if num_reached(both) == len(both):
        return math.inf
    return min((need.budget for need in both if need.budget is not None), default=math.inf)


def gain(baseline: Sequence[Need], candidate: Sequence[Need]) -> Effect | None:
    """By which factor the candidate needs less than the baseline, up to the common budget; paired by seed.

    Returns:
        None where no seed of either side reached the target within the budget, or something is not known.
    """
    budget = common_budget(baseline, candidate)
    sides = [sorted(side, key=lambda need: need.seed) for side in (baseline, candidate)]
    amounts = [[need.up_to(budget) for need in side] for side in sides]
    known = [[amount for amount in side if amount is not None] for side in amounts]
    if known != amounts or all(amount == budget for side in known for amount in side):
        return None
    seeds, others = ([need.seed for need in side] for side in sides)
    paired = seeds == others and len(set(seeds)) == len(seeds)
    return improvement(*known, higher_is_better=False, paired=paired)
