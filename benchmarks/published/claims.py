"""Claims: what a document says, how it is measured here, and the rule that decides, fixed before anybody looks."""

from __future__ import annotations

import dataclasses
from typing import Literal

from bench.report.statistics import FEWEST_SEEDS
from benchmarks.published.figures import Figure, Measure, Missing, SweepRuns

RULE = f"""\
A claim is a side of a bound. It is *reproduced* if the whole 95 % interval over seeds lies on that side, *not
reproduced* if the whole interval lies on the other, else *undecided*; with fewer than {FEWEST_SEEDS} seeds always
undecided, and so where the better side is known only up to a budget because one of its seeds missed the target. Bounds
were fixed before the runs: the document's own where it states one, else a factor of 1, one point of accuracy where it
is said to be kept, no difference where one thing is said to be better than another, and 1.9 where something is said to
be halved. Intervals are compared before they are rounded, each row by itself: one in twenty may be wrong by chance. A
claim measured in several set-ups counts once for each; rows *for comparison* show what the document does not claim: the
methods beside it, presets of our own, and figures or targets that were chosen after the rows had been seen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bound:
    """What is claimed of a figure: that it lies above or below this."""

    side: Literal["above", "below"]
    value: float


def above(value: float) -> Bound:
    """The figure is claimed to be larger than this."""
    return Bound(side="above", value=value)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that a figure decides.

    Attributes:
        text: what is claimed.
        source: where the document says so.
        setup: what was run.
        sweep: whose rows the figure is computed from.
        measure: how.
        claimed: the bound.
        reason: why the figure decides nothing here, where it does not; it is shown all the same.
        counts: False for what the document does not claim; it is judged for comparison.
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
        verdict: "built", where it says how the method works and tests hold it, or "not testable here".
        why: the tests, or the reason.
    """

    text: str
    source: str
    verdict: Literal["built", "not testable here"]
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim's outcome: what was measured, in words, and the verdict."""

    measured: str
    verdict: str


def judge(claim: Claim, runs: SweepRuns) -> Judged:
    """Measure and decide; rows that are missing are said, not guessed."""
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


def verdict(figure: Figure, claimed: Bound) -> str:
    """Apply the rule."""
    if figure.low is None or figure.high is None or figure.n < FEWEST_SEEDS or not figure.decides:
        return "undecided"
    is_above, is_below = figure.low > claimed.value, figure.high < claimed.value
    if claimed.side == "below":
        is_above, is_below = is_below, is_above
    return "reproduced" if is_above else "not reproduced" if is_below else "undecided"
