"""Define claims of a document, their measurement, and the rule for verdicts, which was fixed before the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from bench.report.statistics import FEWEST_SEEDS
from benchmarks.published.figures import Figure, Measure, Missing, SweepRuns, Which

# Figures within this factor, or this share, of a bound are the same as the bound for all practical purposes.
SAME_FACTOR, SAME_SHARE = 1.1, 0.005

RULE = f"""\
A claim says that a figure lies above or below a bound. It is *reproduced* if the whole 95 % interval over seeds lies on
that side of the bound, *not reproduced* if the whole interval lies on the other side, *same* if the whole interval lies
within {SAME_FACTOR - 1:.0%} or {100 * SAME_SHARE:g} points of the bound, and otherwise *undecided*. It is also
undecided with fewer than {FEWEST_SEEDS} seeds, and if the better side is known only up to a budget because one of its
seeds missed the target. Intervals stay valid when seeds are added until a claim is decided, as those of `bench decide`.

Bounds were fixed before the runs: the document's own if it states one; otherwise a factor of 1, one point of accuracy
if accuracy is said to be kept, no difference if one thing is said to be better than another, and 1.9 if something is
said to be halved. Intervals are compared before they are rounded, each row by itself, so one in twenty may be wrong at
random. A claim measured in several set-ups counts once for each. Rows *for comparison* show what the document does not
claim: other methods, presets of our own, and figures or targets that were chosen after the rows had been seen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """The claim that a figure lies above or below a value."""

    side: Literal["above", "below"]
    value: float


def above(value: float) -> Bound:
    return Bound(side="above", value=value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that a measured figure decides.

    Attributes:
        text: the claim.
        source: the place in the document.
        setup: a description of the runs.
        sweep: the sweep whose rows the figure is computed from.
        measure: the way to compute the figure.
        claimed: the bound.
        reason: why the figure is shown but decides nothing; empty if it decides.
        counts: False if the document does not claim this, so that it is only judged for comparison.
    """

    text: str
    source: str
    setup: str
    sweep: str
    measure: Measure
    claimed: Bound
    reason: str = ""
    counts: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stated:
    """A claim without a figure.

    Attributes:
        verdict: "built" if it describes how the method works and tests check this, or "not testable here".
        why: the implementation and tests, or the reason.
    """

    text: str
    source: str
    verdict: Literal["built", "not testable here"]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """The outcome of a claim: the measured figure in words, and the verdict."""

    measured: str
    verdict: str


def judge(claim: Claim, runs: SweepRuns) -> Judged:
    """Measure a claim and decide it; missing rows give "not measured"."""
    try:
        figure = claim.measure.of(runs)
    except Missing as missing:
        return Judged(measured=str(missing), verdict="not measured")
    num_failed = sum(map(runs.num_failed, claim.measure.sides))
    measured = f"{figure}; {num_failed} that failed left out" if num_failed else str(figure)
    if claim.reason:
        return Judged(measured=measured, verdict=f"not testable here: {claim.reason}")
    prefix = "" if claim.counts else "for comparison: "
    return Judged(measured=measured, verdict=prefix + verdict(figure, claim.claimed))


def undecided_sides(claims: Iterable[Claim | Stated], runs: SweepRuns, sweep: str) -> list[Which]:
    """Return the configurations that need more rows, because claims about this sweep are undecided."""
    return [
        side
        for claim in claims
        if isinstance(claim, Claim) and claim.sweep == sweep
        and judge(claim, runs).verdict.removeprefix("for comparison: ") in ("undecided", "not measured")
        for side in claim.measure.sides
    ]  # fmt: skip


def verdict(figure: Figure, claimed: Bound) -> str:
    """Apply the rule to a figure."""
    if figure.low is None or figure.high is None or figure.n < FEWEST_SEEDS or not figure.decides:
        return "undecided"
    is_above, is_below = figure.low > claimed.value, figure.high < claimed.value
    if claimed.side == "below":
        is_above, is_below = is_below, is_above
    if is_above or is_below:
        return "reproduced" if is_above else "not reproduced"
    lowest, highest = claimed.value - SAME_SHARE, claimed.value + SAME_SHARE
    if figure.unit == "factor":
        lowest, highest = claimed.value / SAME_FACTOR, claimed.value * SAME_FACTOR
    return "same" if lowest <= figure.low and figure.high <= highest else "undecided"
