"""Gates: limits given by the user (``--fail-on``) that turn a comparison into an exit code."""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from bench.core.errors import UsageError
from bench.report.comparison import Comparison, Row
from bench.report.formats import format_factor, format_points
from bench.report.statistics import CONFIDENCE, Effect

_FORM = re.compile(r"(slower|accuracy):([0-9]{1,9}(?:\.[0-9]+)?)(%?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gate:
    """One limit.

    Attributes:
        kind: ``slower``: worse in the metric of the comparison; ``accuracy``: lower test accuracy.
        limit: the loss that is still allowed, as a share: of the baseline's metric, or of the test set.
        text: as the user wrote it.
    """

    kind: Literal["slower", "accuracy"]
    limit: float
    text: str

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read ``slower:5%`` (per cent of the metric) or ``accuracy:1`` (percentage points).

        Raises:
            UsageError: the text is neither.
        """
        match = _FORM.fullmatch(text.strip())
        if not match or (match[1] == "slower" and not 0 <= float(match[2]) < 100):
            raise UsageError(f"'{text}' is not a gate; write slower:5% (per cent) or accuracy:1 (percentage points)")
        return cls(kind="slower" if match[1] == "slower" else "accuracy", limit=float(match[2]) / 100.0, text=text)


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateResult:
    """What the gates found, one sentence per row and gate.

    Attributes:
        crossed: significantly worse than the limit allows.
        undecided: beyond the limit, but within the noise or with one seed.
        unmeasured: nothing to judge by: a row or the baseline has no finished run or no value.
    """

    crossed: list[str]
    undecided: list[str]
    unmeasured: list[str]


def check(comparison: Comparison, gates: list[Gate]) -> GateResult:
    """Hold every candidate against every gate; a loss counts only if it is significant (Holm-adjusted)."""
    result = GateResult(crossed=[], undecided=[], unmeasured=[])
    for gate in gates:
        for row in comparison.candidates:
            effect, p = _effect(gate, row)
            title = f"{comparison.baseline.title} -> {row.configuration.title}"
            if effect is None:
                result.unmeasured.append(f"{title}: {gate.text} cannot be judged, a side has no measured value")
            elif _loss(gate, effect) > gate.limit:
                if p is not None and p < 1.0 - CONFIDENCE:
                    result.crossed.append(f"{title}: {_finding(gate, effect)} crosses {gate.text}")
                else:
                    result.undecided.append(
                        f"{title}: {_finding(gate, effect)} is beyond {gate.text}, but not significant with these "
                        "seeds, so the gate holds; run more seeds"
                    )
    return result


def _effect(gate: Gate, row: Row) -> tuple[Effect | None, float | None]:
    if row.effects is None:
        return None, None
    if gate.kind == "slower":
        return row.effects.gain, row.effects.gain_p
    return row.effects.accuracy, row.effects.accuracy_p


def _loss(gate: Gate, effect: Effect) -> float:
    return 1.0 - effect.value if gate.kind == "slower" else -effect.value


def _finding(gate: Gate, effect: Effect) -> str:
    if gate.kind == "slower":
        return f"{format_factor(effect.value)}x"
    return f"{format_points(effect.value)} points of accuracy"
