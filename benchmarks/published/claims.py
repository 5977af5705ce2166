"""Define claims of a document, their measurement, and the rule for verdicts, which was fixed before the runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from bench.report.statistics import FEWEST_SEEDS
from benchmarks.published.figures import Figure, Measure, Missing, SweepRuns, Unit, Which

# Figures within this factor, or this share, of a bound are the same as the bound for all practical purposes.
SAME_FACTOR, SAME_SHARE = 1.1, 0.005

RULE = f"""\
A claim says that a figure lies above or below a bound. It is *reproduced* if the whole 95 % interval over seeds lies on
that side of the bound, *not reproduced* if the whole interval lies on the other side, *same* if the whole interval lies
within {100 * (SAME_FACTOR - 1):.0f} % or {100 * SAME_SHARE:g} points of the bound, and otherwise *undecided*. It is
also undecided with fewer than {FEWEST_SEEDS} seeds, and if the better side is known only up to a budget because one of
its seeds missed the target. Intervals stay valid when seeds are added until a claim is decided, as those of
`bench decide`.

Bounds were fixed before the runs: the document's own if it states one; otherwise a factor of 1, one point of accuracy
if accuracy is said to be kept, no difference if one thing is said to be better than another, and 1.9 if something is
said to be halved. Intervals are compared before they are rounded, each row by itself, so one in twenty may be wrong at
random. A line with several figures, such as "shortest time" against each method or accuracy for several numbers of
nodes, is one claim: it is not reproduced if one figure refutes it, and reproduced only if all figures support it. This
grouping and the margins for *same* were introduced after rows had been seen, when most single comparisons were still
undecided; the comparisons themselves are all listed. Rows *for comparison* show what the document does not claim:
other methods, presets of our own, and figures or targets that were chosen after the rows had been seen."""


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
        measure: the way to compute the figure; or several by name, such as one for each method, which must all agree.
        claimed: the bound.
        reason: why the figure is shown but decides nothing; empty if it decides.
        counts: False if the document does not claim this, so that it is only judged for comparison.
    """

    text: str
    source: str
    setup: str
    sweep: str
    measure: Measure | Mapping[str, Measure]
    claimed: Bound
    reason: str = ""
    counts: bool = True

    @property
    def measures(self) -> Mapping[str, Measure]:
        """The measures by method; the name of a single one is empty."""
        return self.measure if isinstance(self.measure, Mapping) else {"": self.measure}

    @property
    def unit(self) -> Unit:
        """The unit of the figures."""
        return next(iter(self.measures.values())).unit


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
    """Measure a claim and decide it; missing rows give "not measured", unless another figure refutes the claim."""
    figures, missing = {}, {}
    for name, measure in claim.measures.items():
        try:
            figures[name] = measure.of(runs)
        except Missing as what:
            missing[name] = str(what)
    if not figures:
        return Judged(measured=next(iter(missing.values())), verdict="not measured")
    num_failed = sum(runs.num_failed(side) for measure in claim.measures.values() for side in measure.sides)
    notes = [f"{name}: {what}" for name, what in missing.items()]
    notes += [f"{num_failed} that failed left out"] if num_failed else []
    measured = "; ".join([_measured(figures), *notes])
    if claim.reason:
        return Judged(measured=measured, verdict=f"not testable here: {claim.reason}")
    verdicts = {name: verdict(figure, claim.claimed) for name, figure in figures.items()}
    worst = min(verdicts.values(), key=_WORST_FIRST.index)
    if missing and worst != "not reproduced":
        worst = "not measured"
    elif worst == "undecided":
        worst += f" ({_reason([figures[name] for name, each in verdicts.items() if each == worst])})"
    return Judged(measured=measured, verdict=worst if claim.counts else f"for comparison: {worst}")


_WORST_FIRST = ("not reproduced", "undecided", "same", "reproduced")


def _measured(figures: Mapping[str, Figure]) -> str:
    if len(figures) == 1:
        return str(next(iter(figures.values())))
    several = sorted(figures.items(), key=lambda each: each[1].value)
    numbers = sorted({figure.n for figure in figures.values()})
    seeds = f"{numbers[0]} to {numbers[-1]} seeds" if len(numbers) > 1 else f"{numbers[0]} seeds"
    parts = [f"{name} {figure.text}{'' if figure.decides else ' of what is known'}" for name, figure in several]
    return f"{'; '.join(parts)}; {seeds}"


def _reason(figures: Sequence[Figure]) -> str:
    """Return why figures decide nothing."""
    if any(figure.low is None or figure.n < FEWEST_SEEDS for figure in figures):
        return "too few seeds"
    if not all(figure.decides for figure in figures):
        return "a seed of the better side missed the target"
    return f"after {max(figure.n for figure in figures)} seeds the bound is still inside the interval"


def undecided_sides(claims: Iterable[Claim | Stated], runs: SweepRuns, sweep: str) -> list[Which]:
    """Return the configurations that need more rows, because claims about this sweep are undecided."""
    sides: list[Which] = []
    for claim in claims:
        if not isinstance(claim, Claim) or claim.sweep != sweep:
            continue
        if judge(claim, runs).verdict.removeprefix("for comparison: ").startswith(("undecided", "not measured")):
            for measure in claim.measures.values():
                alone = judge(dataclasses.replace(claim, measure=measure, counts=True), runs).verdict
                if alone.startswith(("undecided", "not measured")):
                    sides += measure.sides
    return sides


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
