"""Write the verdict of a comparison in sentences: the answer first, then one sentence for each row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.report.comparison import Comparison, Row
from bench.report.configurations import format_factor, format_interval, format_points
from bench.report.statistics import Effect

_GAINS = {
    "time_to_target_s": "sooner at the target than",
    "samples_per_s": "faster than",
    "test_accuracy": "more accurate than",
}
_BETTER = ("faster", "better", "higher")
_KEPT = ("same", "higher")


def in_words(comparison: Comparison) -> list[str]:
    """Return the answer to whether compression pays, then one sentence for each row."""
    return [_answer(comparison), *map(_evidence, comparison.candidates)]


def _answer(comparison: Comparison) -> str:
    baseline, rows = comparison.baseline, comparison.candidates
    if rows and not baseline.is_dense:
        return f"These runs do not show whether compression pays: the baseline, {baseline.title}, also compresses."
    if rows and all(row.configuration.is_dense for row in rows):
        return "These runs do not show whether compression pays: no row compresses."
    rows = [row for row in rows if not row.configuration.is_dense]
    better = [row for row in rows if row.verdict in _BETTER]
    kept = [row for row in better if row.accuracy.verdict in _KEPT]
    unclear = [row for row in rows if row.verdict in ("unclear", "failed")]
    gain = f"{_GAINS[comparison.metric.name]} {comparison.baseline.title}"
    if not rows:
        return f"There is only {comparison.baseline.title}, and nothing to compare it with."
    if kept:
        return f"Yes: {_titles(kept)} {_is(kept)} {gain}, and not less accurate."
    if better:
        return f"Perhaps: {_titles(better)} {_is(better)} {gain}, but less accurate, or the accuracy is unclear."
    if unclear:
        return f"These runs do not show whether {_titles(unclear)} {_is(unclear)} {gain}."
    return f"No: no row is {gain}."


def _evidence(row: Row) -> str:
    parts = list(_effects(row))
    return f"{row.configuration.title}: {'; '.join(parts) if parts else 'no run ended well'}."


def _effects(row: Row) -> Iterator[str]:
    if gain := row.gain.effect:
        yield f"{row.verdict}, {_with_interval(gain, [f'{format_factor(bound)}x' for bound in _bounds(gain)])}"
    elif row.verdict != "failed":
        yield row.verdict
    if accuracy := row.accuracy.effect:
        points = [format_points(bound) for bound in _bounds(accuracy)]
        yield f"accuracy {row.accuracy.verdict}, {_with_interval(accuracy, points)} percentage points"


def _bounds(effect: Effect) -> list[float]:
    return [effect.value, *(bound for bound in (effect.low, effect.high) if bound is not None)]


def _with_interval(effect: Effect, texts: Sequence[str]) -> str:
    """Return the text of the value, with its bounds if it has any."""
    return texts[0] if effect.low is None else format_interval(*texts)


def _titles(rows: Sequence[Row]) -> str:
    *most, last = (row.configuration.title for row in rows)
    return f"{', '.join(most)} and {last}" if most else last


def _is(rows: Sequence[Row]) -> str:
    return "is" if len(rows) == 1 else "are"
