"""Check a comparison against the user's limits (``--fail-on``), which decide the exit code."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from bench.core.errors import UsageError
from bench.report.columns import format_factor, format_points
from bench.report.comparison import ComparedRow, Comparison, diverges_more_often
from bench.report.statistics import CONFIDENCE, Effect, improvement
from bench.report.store import Run

GateKind = Literal["slower", "accuracy", "bytes"]

_FORM = re.compile(r"(?:(slower):\+?|(accuracy):-?|(bytes):\+?)([0-9]{1,9}(?:\.[0-9]+)?)(%?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """One limit.

    Attributes:
        kind: ``slower``: worse in the metric of the comparison; ``accuracy``: lower test accuracy; ``bytes``: more
            payload bytes per step.
        limit: the largest loss allowed, as a share of the baseline's value; for accuracy a difference of shares.
        text: the text that the user wrote.
    """

    kind: GateKind
    limit: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read ``slower:5%`` or ``bytes:+1%`` (per cent) or ``accuracy:-0.5`` (percentage points).

        Raises:
            UsageError: the text is none of these.
        """
        match = _FORM.fullmatch(text.strip())
        if not match or (match[1] and float(match[4]) >= 100) or (match[2] and match[5]):
            raise UsageError(
                f"'{text}' is not a gate; write slower:5% or bytes:+1% (per cent), or accuracy:-0.5 (percentage points)"
            )
        kind: GateKind = "slower" if match[1] else "accuracy" if match[2] else "bytes"
        return cls(kind=kind, limit=float(match[4]) / 100.0, text=text)


def is_gate(text: str) -> bool:
    """Return True if the text has the form of a gate."""
    return _FORM.fullmatch(text) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateResult:
    """The results of all gates, one sentence per row and gate.

    Attributes:
        crossed: rows that are significantly worse than the limit allows.
        undecided: rows that are beyond the limit, but within the noise or with one seed.
        unmeasured: rows that cannot be judged, because they or the baseline have no finished run or no value.
    """

    crossed: list[str] = dataclasses.field(default_factory=list)
    undecided: list[str] = dataclasses.field(default_factory=list)
    unmeasured: list[str] = dataclasses.field(default_factory=list)

    def __add__(self, other: GateResult) -> GateResult:
        """Return the sentences of both results."""
        return GateResult(
            crossed=self.crossed + other.crossed,
            undecided=self.undecided + other.undecided,
            unmeasured=self.unmeasured + other.unmeasured,
        )


def check(comparison: Comparison, gates: list[Gate]) -> GateResult:
    """Check every candidate against every gate; a loss of speed or accuracy counts only if it is significant.

    Raises:
        UsageError: a gate is about speed, but the metric of the comparison is accuracy.
    """
    result = GateResult()
    keys = comparison.by or ("config_id",)
    shown = {tuple(run[key] for key in keys) for group in comparison.groups for run in group.runs}
    without_row = [run for run in comparison.unfinished if tuple(run[key] for key in keys) not in shown]
    for gate in gates:
        if gate.kind == "slower" and comparison.metric.name == "test_accuracy":
            raise UsageError(f"{gate.text} needs a factor, but --metric is test_accuracy; write accuracy:0.5 instead")
        result.unmeasured.extend(
            f"{gate.text} cannot be judged for {run.title}: it {run.ending}" for run in without_row
        )
        if not comparison.candidates:
            result.unmeasured.append(
                f"{gate.text} cannot be judged: there is no row besides {comparison.baseline.title}"
            )
        for row in comparison.candidates:
            _check_row(gate, comparison, row, result)
    return result


def _check_row(gate: Gate, comparison: Comparison, row: ComparedRow, result: GateResult) -> None:
    """Add a sentence to the result unless the row keeps the limit."""
    title = f"{comparison.baseline.title} -> {row.group.title}"
    if gate.kind == "accuracy" and diverges_more_often(row.group, comparison.baseline):
        lost, seeds = len(row.group.diverged), len(row.group.runs)
        result.crossed.append(f"{title}: {lost} of {seeds} seeds diverged, which crosses {gate.text}")
        return
    finding = row.accuracy if gate.kind == "accuracy" else row.gain
    effect, certain = finding.effect, finding.p is not None and finding.p < 1.0 - CONFIDENCE and not finding.held_back
    if gate.kind == "bytes":  # they are counted and have no noise
        sides = [each.values("payload_bytes_per_step") for each in (comparison.baseline, row.group)]
        effect, certain = improvement(*sides, higher_is_better=False, counted=True), True
    if effect is None:
        result.unmeasured.append(f"{title}: {gate.text} cannot be judged: one of the two has no measured value")
        return
    loss, change = _loss(gate, comparison, effect)
    if loss <= gate.limit:
        return
    if certain:
        result.crossed.append(f"{title}: {change} crosses {gate.text}")
        return
    reason = "with these seeds that may be noise, so the gate passes; run more seeds"
    if finding.held_back:
        reason = "seeds that missed their target or diverged allow no verdict, so the gate passes"
    result.undecided.append(f"{title}: {change} is beyond {gate.text}, but {reason}")


def _loss(gate: Gate, comparison: Comparison, effect: Effect) -> tuple[float, str]:
    """Return by which share of the baseline's value the candidate is worse, and the change in words."""
    if gate.kind == "accuracy":
        return -effect.value, f"{format_points(effect.value)} points of accuracy"
    more = 1.0 / effect.value - 1.0
    if gate.kind == "bytes":
        return more, f"{more:+.1%} bytes per step"
    return 1.0 - effect.value if comparison.metric.better == "higher" else more, f"{format_factor(effect.value)}x"


TOLERANCE = 0.03  # allowed difference of accuracy, as a share, on another processor or with another torch

_SAME_ROUNDING = ("cpu", "torch_version", "device", "threads")


def check_reference(runs: Sequence[Run], reference: Sequence[Run]) -> GateResult:
    """Compare runs with the reference; of each name and seed the newest successful run counts.

    Returns:
        Changes as ``crossed``, and runs that only one side has as ``unmeasured``.
    """
    ours, theirs = _by_name(runs), _by_name(reference)
    return GateResult(
        crossed=[f"{key}: {change}" for key in theirs if key in ours for change in _changes(ours[key], theirs[key])],
        unmeasured=[
            *(f"{key} is in the reference, but no such run ended well" for key in theirs if key not in ours),
            *(f"{key} is not in the reference; renew it" for key in ours if key not in theirs),
        ],
    )


def _by_name(runs: Sequence[Run]) -> dict[str, Run]:
    well = sorted((run for run in runs if run.ended_well), key=lambda run: run["started_at"] or "")
    return {f"{run['name']} seed {run['seed']}": run for run in well}


def _changes(run: Run, reference: Run) -> Iterator[str]:
    now, then = run["payload_bytes_per_step"], reference["payload_bytes_per_step"]
    if now != then:
        more = f" ({now / then - 1.0:+.1%})" if now and then else ""
        yield f"payload_bytes_per_step was {then} and is {now}{more}"
    now, then = run["test_accuracy"], reference["test_accuracy"]
    exact = all(run[name] == reference[name] for name in _SAME_ROUNDING)
    allowed = 0.0 if exact else TOLERANCE
    if now != then and (None in (now, then) or abs(now - then) > allowed):
        where = "on the same processor and torch" if exact else f"more than {TOLERANCE:.0%} on another machine or torch"
        yield f"test_accuracy was {then} and is {now}, {where}"
