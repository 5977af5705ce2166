"""Check a comparison against the user's limits (option ``--fail-on``), and runs against a file of reference runs.

The results decide the exit code of `bench compare`.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Self

from bench.core.errors import UsageError
from bench.report.columns import format_factor, format_points
from bench.report.comparison import ComparedRow, Comparison, Finding, diverges_more_often
from bench.report.quality import Metric, metrics, quality_of
from bench.report.statistics import CONFIDENCE, improvement
from bench.report.store import Run

FORM = re.compile(r"([a-z_0-9]+):([+-]?)([0-9]{1,9}(?:\.[0-9]+)?)(%?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """One limit that the user gave with ``--fail-on``, such as ``slower:5%``.

    Attributes:
        kind: the quantity that must not become worse. ``slower``: the metric of the comparison; ``bytes``: the payload
            bytes per step; otherwise the name of a metric of models, such as ``accuracy``.
        limit: how much worse than the baseline a row may be. For accuracy, a difference, such as 0.005 for 0.5
            percentage points; for other quantities, a share of the baseline's value, such as 0.05 for 5%.
        text: the limit as the user wrote it.
        quality: the metric of models that `kind` names; None for ``slower`` and ``bytes``.
    """

    kind: str
    limit: float
    text: str
    quality: Metric | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the limit that the text describes.

        Args:
            text: ``slower:5%``, ``bytes:+1%`` or ``bits_per_byte:+1%`` (per cent), or ``accuracy:-0.5`` (percentage
                points).

        Raises:
            UsageError: the text has none of these forms, or the limit of ``slower`` is 100 % or more.
        """
        of_quality = {metric.name: metric for metric in metrics()}
        if match := FORM.fullmatch(text.strip()):
            kind, sign, number, per_cent = match.groups()
            quality, limit = of_quality.get(kind), float(number) / 100.0
            has_sign = sign in ("", "-" if quality and quality.higher_is_better else "+")
            is_share = quality is not None and quality.is_share
            is_possible = kind in ("bytes", *of_quality) or (kind == "slower" and limit < 1.0)
            if is_possible and has_sign and not (is_share and per_cent):
                return cls(kind=kind, limit=limit, text=text, quality=quality)
        own = ", ".join(f"{metric.gate}{' (points)' if metric.is_share else ''}" for metric in metrics())
        raise UsageError(f"'{text}' is not a limit for --fail-on; write slower:5%, bytes:+1%, {own}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateResult:
    """The results of checking all limits: sentences for the user, one per compared row and limit.

    Attributes:
        crossed: sentences about rows that are significantly worse than a limit allows.
        undecided: sentences about rows that are beyond a limit, but whose difference may be noise or comes from one
            seed.
        unmeasured: sentences about rows that cannot be judged, because the row or the baseline has no finished run or
            no value.
    """

    crossed: list[str] = dataclasses.field(default_factory=list)
    undecided: list[str] = dataclasses.field(default_factory=list)
    unmeasured: list[str] = dataclasses.field(default_factory=list)


def check(comparison: Comparison, gates: list[Gate]) -> GateResult:
    """Check every candidate against every limit.

    A row that is worse in speed or quality crosses a limit only if the difference is significant.

    Raises:
        UsageError: a limit is of kind ``slower``, but the comparison is about the quality of the models; or a limit
            names a measure of quality that the compared runs do not use.
    """
    result = GateResult()
    keys = comparison.by or ("config_id",)
    shown = {tuple(run[key] for key in keys) for group in comparison.groups for run in group.runs}
    missing = [
        f" for {run.title}: it {run.ending}"
        for run in comparison.unfinished
        if tuple(run[key] for key in keys) not in shown
    ]
    if not comparison.candidates:
        missing.append(f": there is no row besides {comparison.baseline.title}")
    for gate in gates:
        quality = comparison.quality
        if gate.kind == "slower" and comparison.is_about_quality:
            raise UsageError(
                f"{gate.text} limits a factor, but --metric {quality.column} is compared by "
                f"{'' if quality.is_share else 'relative '}difference; write "
                f"--fail-on {quality.gate} instead"
            )
        if gate.quality not in (None, quality):
            raise UsageError(
                f"{gate.text} does not fit these runs, which are compared in {quality.noun}; write "
                f"--fail-on {quality.gate} instead"
            )
        result.unmeasured.extend(f"{gate.text} cannot be judged{reason}" for reason in missing)
        for row in comparison.candidates:
            _check_row(gate, comparison, row, result)
    return result


def _check_row(gate: Gate, comparison: Comparison, row: ComparedRow, result: GateResult) -> None:
    title = f"{comparison.baseline.title} -> {row.group.title}"
    quality = gate.quality
    if quality and diverges_more_often(row.group, comparison.baseline):
        lost, seeds = len(row.group.diverged), len(row.group.runs)
        result.crossed.append(f"{title}: {lost} of {seeds} seeds diverged, which crosses {gate.text}")
        return
    finding = row.accuracy if quality else row.gain
    if gate.kind == "bytes":  # bytes are counted, so they have no noise
        sides = [each.values("payload_bytes_per_step") for each in (comparison.baseline, row.group)]
        effect = improvement(*sides, higher_is_better=False, counted=True)
        finding = Finding(effect=effect, p=0.0, verdict="worse")
    if finding.effect is None:
        result.unmeasured.append(f"{title}: {gate.text} cannot be judged: the row or the baseline has no value")
        return
    value = finding.effect.value
    # ``loss`` is the share of the baseline's value by which the candidate is worse.
    if quality:
        loss, change = quality.cost(value), f"{quality.noun} {format_points(value)} {quality.unit}"
    elif gate.kind == "bytes":
        loss, change = 1.0 / value - 1.0, f"{1.0 / value - 1.0:+.1%} bytes per step"
    else:
        loss = 1.0 - value if comparison.metric.better == "higher" else 1.0 / value - 1.0
        change = f"{format_factor(value)}x"
    is_significant = finding.p is not None and finding.p < 1.0 - CONFIDENCE
    noise = "with these seeds that may be noise, so the gate passes; run more seeds"
    held_back = "seeds that missed their target or diverged allow no verdict, so the gate passes"
    if loss > gate.limit and is_significant and not finding.held_back:
        result.crossed.append(f"{title}: {change} crosses {gate.text}")
    elif loss > gate.limit:
        reason = held_back if finding.held_back else noise
        result.undecided.append(f"{title}: {change} is beyond {gate.text}, but {reason}")


TOLERANCE = 0.03  # allowed change of quality, as a share, on another processor or with another torch

_BYTES = ("payload_bytes_per_step", "state_bytes_per_step", "activation_bytes_per_step")
_SAME_ROUNDING = ("cpu", "torch_version", "device", "threads")


def check_reference(runs: Sequence[Run], reference: Sequence[Run]) -> GateResult:
    """Compare the bytes and the quality of runs with those of reference runs that have the same name and seed.

    If several runs have the same name and seed, the newest successful one counts.

    Returns:
        A result whose ``crossed`` holds sentences about differences, and whose ``unmeasured`` holds sentences about
        runs that only one side has.
    """
    ours, theirs = (
        {
            f"{run['name']} seed {run['seed']}": run
            for run in sorted(side, key=lambda run: run["started_at"] or "")
            if run.ended_well
        }
        for side in (runs, reference)
    )
    return GateResult(
        crossed=[f"{key}: {change}" for key in theirs if key in ours for change in _changes(ours[key], theirs[key])],
        unmeasured=[
            *(f"{key} is in the reference file, but no such run ended well now" for key in theirs if key not in ours),
            *(f"{key} is not in the reference file; add this run to it" for key in ours if key not in theirs),
        ],
    )


def _changes(run: Run, reference: Run) -> Iterator[str]:
    for column in _BYTES:
        now, then = run[column], reference[column]
        if now != then:
            more = f" ({now / then - 1.0:+.1%})" if now and then else ""
            yield f"{column} was {then} and is {now}{more}"
    quality = quality_of([reference.last_known])
    now, then = run[quality.column], reference[quality.column]
    exact = all(run[name] == reference[name] for name in _SAME_ROUNDING)
    if now != then and (
        exact or None in (now, then) or abs(quality.change(quality.scaled(now) - quality.scaled(then))) > TOLERANCE
    ):
        where = "on the same processor and torch" if exact else f"more than {TOLERANCE:.0%} on another machine or torch"
        yield f"{quality.column} was {then} and is {now}, {where}"
