"""Comparison: every configuration beside one baseline, with what may be said about speed and accuracy.

The direction is always baseline -> candidate and never flips: a factor above 1 means that the candidate is better.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from bench.core.errors import UsageError
from bench.core.schema import Column
from bench.report import baseline as baselines
from bench.report.columns import find_column, find_metric
from bench.report.configurations import Configuration, configurations
from bench.report.runs import Repeat, final_states, one_per_seed
from bench.report.statistics import Effect, Significance, difference, holm, improvement, judge

if TYPE_CHECKING:
    import pandas as pd

SAME_FACTOR = (1 / 1.05, 1.05)
"""Factors that make no practical difference."""
SAME_ACCURACY = (-0.01, 0.01)
"""Differences of accuracy, as shares, that make no practical difference."""

Verdict = Literal["baseline", "faster", "slower", "better", "worse", "higher", "lower", "same", "unclear", "failed"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effects:
    """Everything that a candidate is judged by; an effect is None where a side has no value.

    Attributes:
        gain: factor by which the candidate is better in the chosen metric.
        gain_p: its p-value, adjusted (Holm) for the number of candidates.
        accuracy: difference of test accuracy, as a share.
        accuracy_p: likewise.
    """

    gain: Effect | None
    gain_p: float | None
    accuracy: Effect | None
    accuracy_p: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration and how it stands against the baseline (``effects`` is None for the baseline itself)."""

    configuration: Configuration
    effects: Effects | None
    verdict: Verdict
    accuracy_verdict: Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows beside a baseline.

    Attributes:
        metric: the column that the verdict is about.
        by: the columns grouped by; empty for ``config_id``.
        rows: the baseline first, then the candidates in order of appearance.
        repeats: seeds that were run more than once.
        ambiguity: what to say where ``--baseline`` fits several rows.
    """

    metric: Column
    by: tuple[str, ...]
    rows: list[Row]
    repeats: list[Repeat]
    ambiguity: str | None

    @property
    def baseline(self) -> Configuration:
        """The configuration that the others are compared with."""
        return self.rows[0].configuration

    @property
    def candidates(self) -> list[Row]:
        """All rows but the baseline."""
        return self.rows[1:]


def compare(
    rows: pd.DataFrame, *, baseline: str | None = None, metric: str = "samples_per_s", by: Sequence[str] = ()
) -> Comparison:
    """Compare every configuration with one baseline.

    Args:
        rows: what ``store.load`` returns; not changed.
        baseline: what names the baseline (``baseline.choose``); None: the row without compression.
        metric: the column that the verdict is about.
        by: columns to group by instead of ``config_id``.

    Raises:
        UsageError: an unknown column, a baseline that no row fits, or a metric that no finished run has.
    """
    column = find_metric(metric)
    by = [find_column(name).name for name in by]
    runs, repeats = one_per_seed(final_states(rows), by)
    groups = configurations(runs, by)
    _check_measured(column, groups)
    chosen, ambiguity = baselines.choose(groups, baseline)
    candidates = [group for group in groups if group is not chosen]
    return Comparison(
        metric=column,
        by=tuple(by),
        rows=[
            Row(
                configuration=chosen,
                effects=None,
                verdict="baseline" if len(chosen.ok) else "failed",
                accuracy_verdict="baseline" if len(chosen.ok) else "failed",
            ),
            *(
                _row(group, effects, column)
                for group, effects in zip(candidates, _effects(chosen, candidates, column), strict=True)
            ),
        ],
        repeats=repeats,
        ambiguity=ambiguity,
    )


def _check_measured(metric: Column, groups: Sequence[Configuration]) -> None:
    finished = [group for group in groups if len(group.ok)]
    all_missed = metric.name == "time_to_target_s" and any(group.num_missed for group in finished)
    if finished and not all_missed and not any(group.values(metric.name) for group in finished):
        raise UsageError(f"no finished run has a value in {metric.name}; choose another --metric")


def _effects(baseline: Configuration, candidates: Sequence[Configuration], metric: Column) -> list[Effects]:
    gains = [_gain(baseline, candidate, metric) for candidate in candidates]
    accuracies = [
        difference(baseline.values("test_accuracy"), candidate.values("test_accuracy")) for candidate in candidates
    ]
    return [
        Effects(gain=gain, gain_p=gain_p, accuracy=accuracy, accuracy_p=accuracy_p)
        for gain, gain_p, accuracy, accuracy_p in zip(
            gains,
            holm([gain.p if gain else None for gain in gains]),
            accuracies,
            holm([accuracy.p if accuracy else None for accuracy in accuracies]),
            strict=True,
        )
    ]


def _gain(baseline: Configuration, candidate: Configuration, metric: Column) -> Effect | None:
    if metric.name == "time_to_target_s" and (baseline.num_missed or candidate.num_missed):
        return None  # a mean over the seeds that reached the target would reward missing it
    higher = metric.better == "higher"
    return improvement(baseline.values(metric.name), candidate.values(metric.name), higher_is_better=higher)


def _row(candidate: Configuration, effects: Effects, metric: Column) -> Row:
    if not len(candidate.ok):
        return Row(configuration=candidate, effects=effects, verdict="failed", accuracy_verdict="failed")
    better, worse = _words(metric)
    accuracy_verdict = _say(effects.accuracy, effects.accuracy_p, SAME_ACCURACY, "higher", "lower")
    return Row(
        configuration=candidate,
        effects=effects,
        verdict=accuracy_verdict
        if metric.name == "test_accuracy"
        else _say(effects.gain, effects.gain_p, SAME_FACTOR, better, worse),
        accuracy_verdict=accuracy_verdict,
    )


def _words(metric: Column) -> tuple[Verdict, Verdict]:
    return ("faster", "slower") if metric.unit in ("s", "samples/s") else ("better", "worse")


def _say(effect: Effect | None, p: float | None, same: tuple[float, float], above: Verdict, below: Verdict) -> Verdict:
    said: Significance = judge(effect, same=same, p=p) if effect else "unclear"
    words: dict[Significance, Verdict] = {"above": above, "below": below, "same": "same", "unclear": "unclear"}
    return words[said]
