"""The table of a comparison: which columns it has and how each cell reads."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.comparison import Comparison, Row, Verdict
from bench.report.configurations import Configuration
from bench.report.formats import (
    NOTHING,
    format_bound,
    format_factor,
    format_interval,
    format_number,
    format_points,
    format_value,
)
from bench.report.statistics import Effect
from bench.report.tables import Cell, Column, Raw, Table

_HEADINGS = {
    "samples_per_s": "samples/s",
    "test_accuracy": "accuracy, %",
    "time_to_target_s": "time to\ntarget",
    "payload_bytes_per_step": "payload\nper step",
    "compression_ratio": "compression",
    "wire_bytes_per_step": "wire bytes\nper step",
    "step_time_s": "step\ntime",
    "exposed_s": "exposed\nper step",
}
# Shown as plain means after the columns of the verdict, unless one of them is the metric itself.
_MEANS = (
    "time_to_target_s",
    "payload_bytes_per_step",
    "compression_ratio",
    "wire_bytes_per_step",
    "step_time_s",
    "exposed_s",
)
_STYLES: dict[Verdict, str] = {
    "baseline": "dim",
    "faster": "green",
    "better": "green",
    "higher": "green",
    "slower": "red",
    "worse": "red",
    "lower": "red",
    "failed": "red",
    "unclear": "yellow",
}
_SHARED = ("dataset", "model", "optimizer", "lr", "world_size", "batch_size", "epochs", "steps", "hosts", "uplink_bps")


def comparison_table(comparison: Comparison) -> Table:
    """One row per configuration, the baseline first."""
    parts = [_cells(comparison, row) for row in comparison.rows]
    columns = [column for column, _ in parts[0]]
    rows = [[cell for _, cell in part] for part in parts]
    estimated = any(cell.text.startswith("~") for row in rows for cell in row)
    return Table(
        title=_title(comparison),
        subtitle=" ".join(f"{name}={value}" for name, value in shared_settings(comparison).items()),
        columns=columns,
        rows=rows,
        notes=[
            "[low, high]: 95 % interval over seeds; ±: standard deviation over seeds"
            + ("; ~: by formula or estimated, not counted" if estimated else "")
        ],
    )


def shared_settings(comparison: Comparison) -> dict[str, str]:
    """The settings that are the same in all rows, of those that a reader asks for first."""
    shared = {}
    for name in _SHARED:
        values = {format_value(name, value) for row in comparison.rows for value in row.configuration.distinct(name)}
        if len(values) == 1 and (name, values) != ("hosts", {"1"}):
            shared[name] = values.pop()
    return shared


def _title(comparison: Comparison) -> str:
    metric = comparison.metric
    heading = _heading(metric.name).replace("\n", " ")
    if metric.name == "test_accuracy":
        return f"{heading}: baseline {comparison.baseline.title} -> each row"
    better = "faster" if _is_speed(comparison) else "better"
    return f"{heading}: baseline {comparison.baseline.title} -> each row (above 1x is {better})"


def _cells(comparison: Comparison, row: Row) -> list[tuple[Column, Cell]]:
    configuration, metric = row.configuration, comparison.metric.name
    named = [
        (Column(heading=name, align="left", priority=0), Cell(text=format_value(name, value), raw={name: value}))
        for name, value in configuration.label.items()
    ]
    judged = [(Column(heading="seeds"), _seeds_cell(configuration, comparison.by))]
    if metric != "test_accuracy":
        judged.append((_mean_column(metric, "\n[95% CI]", 2), _mean_cell(configuration, metric, interval=True)))
        judged.append((_gain_column(comparison), _gain_cell(row)))
    judged += [
        (Column(heading="verdict", align="left"), _verdict_cell(comparison, row)),
        (Column(heading="accuracy\n% ± sd"), _accuracy_cell(configuration)),
        (Column(heading="accuracy vs baseline\npoints [95% CI]", priority=3), _accuracy_difference_cell(row)),
    ]
    if metric != "samples_per_s":
        samples = _mean_cell(configuration, "samples_per_s", interval=True)
        judged.append((_mean_column("samples_per_s", "\n[95% CI]", 4), samples))
    means = [
        (_mean_column(name, "", 3 if name in _MEANS[:2] else 4), _mean_cell(configuration, name))
        for name in _MEANS
        if name != metric
    ]
    return [*named, *judged, *means, (Column(heading="in sync", priority=2), _sync_cell(configuration))]


def _seeds_cell(configuration: Configuration, by: Sequence[str]) -> Cell:
    ok, runs = len(configuration.ok), len(configuration.runs)
    ids = [] if by else configuration.distinct("config_id")
    return Cell(
        text=f"{ok}/{runs} ok",
        raw={"num_seeds": runs, "num_ok": ok, "config_id": ids[0] if len(ids) == 1 else None},
        style="" if ok == runs else "red",
    )


def _mean_column(name: str, suffix: str, priority: int) -> Column:
    return Column(heading=_heading(name) + suffix, priority=priority)


def _mean_cell(configuration: Configuration, name: str, *, interval: bool = False) -> Cell:
    known = configuration.estimate(name)
    text = NOTHING
    raw: dict[str, Raw] = {name: known.mean if known else None}
    if known:
        text = _mark(configuration, name) + _value(name, known.mean)
    if interval:
        low, high = (known.low, known.high) if known else (None, None)
        low = None if low is None else max(low, 0.0)  # what is compared by a factor is never negative
        raw |= {f"{name}_low": low, f"{name}_high": high}
        text = format_interval(
            text, *(None if bound is None else format_bound(name, bound, text) for bound in (low, high))
        )
    if name == "time_to_target_s":
        raw["num_missed"] = configuration.num_missed
        if configuration.num_missed:
            num_reached = len(configuration.ok) - configuration.num_missed
            text = f"{text} ({num_reached}/{len(configuration.ok)})" if known else "miss"
    if name == "payload_bytes_per_step":
        raw["payload_bytes_source"] = "+".join(configuration.distinct("payload_bytes_source")) or None
    return Cell(text=text, raw=raw)


def _mark(configuration: Configuration, name: str) -> str:
    """``~`` before a number of bytes that nobody counted."""
    formula = name == "payload_bytes_per_step" and "formula" in configuration.distinct("payload_bytes_source")
    estimated = name.startswith("wire_bytes") and "estimated" in configuration.distinct("wire_headers")
    return "~" if formula or estimated else ""


def _gain_column(comparison: Comparison) -> Column:
    return Column(heading="speed-up\n[95% CI]" if _is_speed(comparison) else "improvement\n[95% CI]")


def _gain_cell(row: Row) -> Cell:
    effect = row.effects.gain if row.effects else None
    raw = {**_effect_raw("gain", effect), "gain_p_adjusted": row.effects.gain_p if row.effects else None}
    if row.effects is None:
        return Cell(text="1.00x", raw=raw, style="dim")
    if effect is None:
        return Cell(raw=raw)
    low, high = (None if bound is None else format_factor(bound) for bound in (effect.low, effect.high))
    return Cell(text=format_interval(f"{format_factor(effect.value)}x", low, high), raw=raw)


def _verdict_cell(comparison: Comparison, row: Row) -> Cell:
    text: str = row.verdict
    if row.verdict == "unclear" and min(len(row.configuration.ok), len(comparison.baseline.ok)) == 1:
        text = "unclear, n=1"
    elif row.verdict == "unclear" and comparison.metric.name == "time_to_target_s" and row.configuration.num_missed:
        text = "unclear, miss"
    return Cell(text=text, raw={"verdict": row.verdict}, style=_STYLES.get(row.verdict, ""))


def _accuracy_cell(configuration: Configuration) -> Cell:
    known = configuration.estimate("test_accuracy")
    raw: dict[str, Raw] = {
        "test_accuracy": known.mean if known else None,
        "test_accuracy_sd": known.sd if known else None,
    }
    if known is None:
        return Cell(raw=raw)
    spread = "" if known.sd is None else f" ± {known.sd * 100:.1f}"
    return Cell(text=f"{known.mean * 100:.1f}{spread}", raw=raw)


def _accuracy_difference_cell(row: Row) -> Cell:
    effect = row.effects.accuracy if row.effects else None
    raw = {
        **_effect_raw("accuracy_difference", effect),
        "accuracy_p_adjusted": row.effects.accuracy_p if row.effects else None,
        "accuracy_verdict": row.accuracy_verdict,
    }
    if effect is None:
        return Cell(raw=raw)
    low, high = (None if bound is None else format_points(bound) for bound in (effect.low, effect.high))
    text = f"{format_interval(format_points(effect.value), low, high)} {row.accuracy_verdict}"
    return Cell(text=text, raw=raw, style=_STYLES.get(row.accuracy_verdict, ""))


def _sync_cell(configuration: Configuration) -> Cell:
    known = configuration.distinct("replicas_in_sync")
    if not known:
        return Cell(raw={"replicas_in_sync": None})
    return Cell(
        text="yes" if all(known) else "NO", raw={"replicas_in_sync": all(known)}, style="" if all(known) else "bold red"
    )


def _effect_raw(name: str, effect: Effect | None) -> dict[str, Raw]:
    return {
        name: effect.value if effect else None,
        f"{name}_low": effect.low if effect else None,
        f"{name}_high": effect.high if effect else None,
    }


def _is_speed(comparison: Comparison) -> bool:
    return comparison.metric.unit in ("s", "samples/s")


def _heading(name: str) -> str:
    return _HEADINGS.get(name, name)


def _value(name: str, value: float) -> str:
    return f"{format_number(value)}x" if name == "compression_ratio" else format_value(name, value)
