"""State the verdict of a comparison: in one to three lines above its table, and in the sentences of a report."""

from collections.abc import Sequence

from bench.report.caveats import differing
from bench.report.columns import format_effect, format_factor, format_points
from bench.report.comparison import ComparedRow, Comparison
from bench.report.store import grouped

_LISTED = 3
_LINES = 3

_ONE_SEED = "No verdict from one seed"
_MISSED = "No verdict, since seeds missed the target or diverged"
_NOISY = "No verdict, too much noise"
_FAILED = "No run ended well"


def in_lines(comparison: Comparison) -> list[str]:
    """Return the verdict in at most three lines, such as ``Faster, no less accurate: topk 1.31x``.

    Rows with the same kind of result share a line. Better rows come first, before equal, worse and unclear rows; the
    third line joins all kinds that are left. If the rows did not do the same work, the first line says so.
    """
    if not comparison.candidates:
        return [f"There is only {comparison.baseline.title}, and nothing to compare it with"]
    better, *others = _words(comparison)
    costs = (", no less accurate", "", ", at some cost", ", accuracy unclear")
    headings = [*(better + cost for cost in costs), *others, _ONE_SEED, _NOISY, _MISSED, _FAILED]
    rows = sorted(
        comparison.candidates, key=lambda row: row.gain.effect.value if row.gain.effect else 0.0, reverse=True
    )
    groups = grouped(rows, lambda row: _heading(comparison, row))
    said = [f"{heading}: {_listing(comparison, groups[heading])}" for heading in headings if heading in groups]
    if mixed := differing(comparison):
        said.insert(0, f"Compare only rows with the same work: these differ in {', '.join(mixed)}")
    return [*said[: _LINES - 1], *filter(None, [". ".join(said[_LINES - 1 :])])]


def _words(comparison: Comparison) -> tuple[str, str, str]:
    if comparison.metric.name == "test_accuracy":
        return "More accurate", "As accurate", "Less accurate"
    if comparison.is_about_speed:
        return "Faster", "As fast", "Slower"
    if comparison.metric.unit == "bytes":
        return "Fewer bytes", "As many bytes", "More bytes"
    return f"Better in {comparison.metric.name}", "The same", "Worse"


def _heading(comparison: Comparison, row: ComparedRow) -> str:
    better, same, worse = _words(comparison)
    match row.gain.verdict:
        case "failed":
            return _FAILED
        case "unclear" if min(len(row.group.ok), len(comparison.baseline.ok)) <= 1:
            return _ONE_SEED
        case "unclear":
            return _MISSED if row.gain.held_back else _NOISY
        case "same":
            return same
        case "slower" | "worse" | "lower":
            return worse
    if comparison.metric.name == "test_accuracy" or row.accuracy.effect is None:
        return better
    costs = {"lower": "at some cost", "unclear": "accuracy unclear"}
    return f"{better}, {costs.get(row.accuracy.verdict, 'no less accurate')}"


def _listing(comparison: Comparison, rows: Sequence[ComparedRow]) -> str:
    texts = [_text(comparison, row) for row in rows[:_LISTED]]
    more = [f"and {len(rows) - _LISTED} more"] if len(rows) > _LISTED else []
    return ("; " if any("," in text for text in texts) else ", ").join([*texts, *more])


def _text(comparison: Comparison, row: ComparedRow) -> str:
    name, gain, accuracy = row.group.short, row.gain.effect, row.accuracy.effect
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


_GAINS = {
    "time_to_target_s": "sooner at the target than",
    "samples_per_s": "faster than",
    "test_accuracy": "more accurate than",
}


def in_sentences(comparison: Comparison) -> list[str]:
    """Return a sentence that answers whether compression pays, and then one sentence for each compared row."""
    return [_answer(comparison), *map(_evidence, comparison.candidates)]


def _answer(comparison: Comparison) -> str:
    baseline, rows = comparison.baseline, comparison.candidates
    if rows and not baseline.is_dense:
        return f"These runs do not show whether compression pays: the baseline, {baseline.title}, also compresses."
    if rows and all(row.group.is_dense for row in rows):
        return "These runs do not show whether compression pays: no row compresses."
    if not rows:
        return f"There is only {baseline.title}, and nothing to compare it with."
    rows = [row for row in rows if not row.group.is_dense]
    better = [row for row in rows if row.gain.verdict in ("faster", "better", "higher")]
    gain = f"{_GAINS[comparison.metric.name]} {baseline.title}"
    if kept := [row for row in better if row.accuracy.verdict in ("same", "higher")]:
        return f"Yes: {_titles(kept)} {gain}, and not less accurate."
    if better:
        return f"Perhaps: {_titles(better)} {gain}, but less accurate, or the accuracy is unclear."
    if unclear := [row for row in rows if row.gain.verdict in ("unclear", "failed")]:
        return f"These runs do not show whether {_titles(unclear)} {gain}."
    return f"No: no row is {gain}."


def _titles(rows: Sequence[ComparedRow]) -> str:
    # The subject of a sentence with its verb: ``a, b and c are``.
    *most, last = (row.group.title for row in rows)
    return f"{', '.join(most)} and {last} are" if most else f"{last} is"


def _evidence(row: ComparedRow) -> str:
    gain, accuracy = row.gain, row.accuracy
    parts: list[str] = [] if gain.verdict == "failed" and gain.effect is None else [gain.verdict]
    if gain.effect:
        parts = [f"{gain.verdict}, {format_effect(gain.effect, lambda factor: f'{format_factor(factor)}x')}"]
    if accuracy.effect:
        points = format_effect(accuracy.effect, format_points)
        parts.append(f"accuracy {accuracy.verdict}, {points} percentage points")
    return f"{row.group.title}: {'; '.join(parts) or 'no run ended well'}."
