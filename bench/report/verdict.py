"""Write the verdict of a comparison in one to three lines."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.caveats import differing_work
from bench.report.comparison import Comparison, Row
from bench.report.configurations import format_factor, format_points

_LISTED = 3
_LINES = 3

_ONE_SEED = "No verdict from one seed"
_MISSED = "No verdict, since seeds missed the target or diverged"
_NOISY = "No verdict, too much noise"
_FAILED = "No run ended well"


def sentences(comparison: Comparison) -> list[str]:
    """Return at most three lines: rows that are better without a loss of accuracy, rows with one, and the others."""
    if not comparison.candidates:
        return [f"There is only {comparison.baseline.title}, and nothing to compare it with"]
    better, same, worse = _words(comparison)
    rows: dict[str, list[Row]] = {
        f"{better}, no less accurate": [],
        better: [],
        f"{better}, at some cost": [],
        f"{better}, accuracy unclear": [],
        same: [],
        worse: [],
        _ONE_SEED: [],
        _NOISY: [],
        _MISSED: [],
        _FAILED: [],
    }
    for row in sorted(comparison.candidates, key=_gain, reverse=True):
        rows[_heading(comparison, row)].append(row)
    said = [f"{heading}: {_listing(comparison, group)}" for heading, group in rows.items() if group]
    if mixed := differing_work(comparison):
        said.insert(0, f"Compare only rows with the same work: these differ in {', '.join(mixed)}")
    return [*said[: _LINES - 1], *filter(None, [". ".join(said[_LINES - 1 :])])]


def _words(comparison: Comparison) -> tuple[str, str, str]:
    """Return the headings for rows that are better, the same and worse."""
    if comparison.metric.name == "test_accuracy":
        return "More accurate", "As accurate", "Less accurate"
    if comparison.is_about_speed:
        return "Faster", "As fast", "Slower"
    if comparison.metric.unit == "bytes":
        return "Fewer bytes", "As many bytes", "More bytes"
    return f"Better in {comparison.metric.name}", "The same", "Worse"


def _heading(comparison: Comparison, row: Row) -> str:
    better, same, worse = _words(comparison)
    match row.verdict:
        case "failed":
            return _FAILED
        case "unclear":
            if min(len(row.configuration.ok), len(comparison.baseline.ok)) <= 1:
                return _ONE_SEED
            return _MISSED if row.gain.held_back else _NOISY
        case "same":
            return same
        case "slower" | "worse" | "lower":
            return worse
    if comparison.metric.name == "test_accuracy" or row.accuracy.effect is None:
        return better
    match row.accuracy.verdict:
        case "lower":
            return f"{better}, at some cost"
        case "unclear":
            return f"{better}, accuracy unclear"
    return f"{better}, no less accurate"


def _gain(row: Row) -> float:
    return row.gain.effect.value if row.gain.effect else 0.0


def _listing(comparison: Comparison, rows: Sequence[Row]) -> str:
    texts = [_text(comparison, row) for row in rows[:_LISTED]]
    more = [f"and {len(rows) - _LISTED} more"] if len(rows) > _LISTED else []
    return ("; " if any("," in text for text in texts) else ", ").join([*texts, *more])


def _text(comparison: Comparison, row: Row) -> str:
    name, gain, accuracy = row.configuration.short, row.gain.effect, row.accuracy.effect
    if gain is None:
        return name
    if comparison.metric.name == "test_accuracy":
        return f"{name} {format_points(gain.value)} points"
    text = f"{name} {format_factor(gain.value)}x"
    if accuracy is None or row.accuracy.verdict in ("same", "higher"):
        return text
    if row.accuracy.verdict == "lower":
        points = f"{-100.0 * accuracy.value:.1f}".removesuffix(".0")
        return f"{text}, {points} {'point' if points == '1' else 'points'} less accurate"
    return f"{text} ({format_points(accuracy.value)} points)"
