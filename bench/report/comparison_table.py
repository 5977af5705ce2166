"""Build the tables of a comparison: one with every column, and a short one for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.report import targets
from bench.report.comparison import Comparison, Finding, Row, Verdict
from bench.report.configurations import (
    NOTHING,
    Configuration,
    format_bound,
    format_factor,
    format_interval,
    format_number,
    format_points,
    format_value,
)
from bench.report.statistics import Effect, Estimate
from bench.report.tables import Cell, Column, Raw, Table
from bench.report.targets import Target
from bench.report.verdict import sentences

_HEADINGS = {
    "samples_per_s": "samples/s",
    "test_accuracy": "accuracy, %",
    "payload_bytes_per_step": "payload\nper step",
    "compression_ratio": "compression\nvs fp32",
    "wire_bytes_per_step": "wire bytes\nper step",
    "step_time_s": "step\ntime",
    "cpu_s_per_step": "CPU time\nper step",
    "forward_backward_s": "forward and\nbackward",
    "encode_s": "encode\nper step",
    "exchange_s": "exchange\nper step",
    "exposed_s": "exposed\nper step",
}
_SHORT_HEADINGS = {"payload_bytes_per_step": "sent/\nstep"}
# Columns shown as means after those of the verdict, except the metric itself.
_MEANS = (
    targets.TIME,
    "payload_bytes_per_step",
    "compression_ratio",
    "wire_bytes_per_step",
    "step_time_s",
    "cpu_s_per_step",
    "exposed_s",
)
_FIRST_MEANS = (targets.TIME, targets.BYTES, "payload_bytes_per_step")
_OF_PAYLOAD = ("payload_bytes_per_step", "compression_ratio", targets.BYTES)
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
_COMPONENTS = ("compressor", "collective", "strategy")
_SHARED = ("dataset", "model", "optimizer", "lr", "world_size", "batch_size", "epochs", "steps", "hosts", "uplink_bps")


def comparison_table(comparison: Comparison, *, extra: Sequence[str] = (), cautions: Sequence[str] = ()) -> Table:
    """Return the table with every column, one row per configuration, the baseline first.

    Args:
        comparison: what to show.
        extra: further columns to show as means.
        cautions: warnings to show above the table.
    """
    parts = [_cells(comparison, row, extra) for row in comparison.rows]
    return _table(comparison, parts, shared_settings(comparison), cautions)


def answer_table(comparison: Comparison, *, extra: Sequence[str] = (), cautions: Sequence[str] = ()) -> Table:
    """Return the table for the terminal: at most 7 columns and the extra ones.

    Args:
        comparison: what to show.
        extra: further columns to show as means.
        cautions: warnings to show above the table.
    """
    parts = [_answer_cells(comparison, row, extra) for row in comparison.rows]
    settings = {name: value for name, value in _shared_components(comparison).items() if _named_by_settings(comparison)}
    settings |= shared_settings(comparison)
    if (seeds := _num_seeds(comparison)) is not None:
        settings["seeds"] = f"{seeds} each" if len(comparison.rows) > 1 else str(seeds)
    return _table(comparison, parts, settings, cautions)


def _table(
    comparison: Comparison,
    parts: Sequence[Sequence[tuple[Column, Cell]]],
    settings: Mapping[str, str],
    cautions: Sequence[str],
) -> Table:
    rows = [[cell for _, cell in part] for part in parts]
    return Table(
        cautions=cautions,
        answer=sentences(comparison),
        title=_title(comparison),
        subtitle=" ".join(f"{name}={value}" for name, value in settings.items()),
        columns=[column for column, _ in parts[0]],
        rows=rows,
        notes=_notes(comparison, [cell.text for row in rows for cell in row]),
    )


def _notes(comparison: Comparison, texts: Sequence[str]) -> list[str]:
    signs = {
        "[low, high]: 95 % interval over seeds": any("[" in text for text in texts),
        "±: standard deviation over seeds": any("±" in text for text in texts),
        "~: from a formula, or estimated": any(text.lstrip("≥").startswith("~") for text in texts),
    }
    notes = ["; ".join(sign for sign, is_used in signs.items() if is_used)]
    if any(text.startswith("≥") for text in texts):
        notes.append(
            "≥ (reached/seeds): seeds that missed the target count with everything that they spent, so the mean is at "
            "least this; two rows are compared up to the smallest budget of any of their seeds"
        )
    return [*filter(None, notes), *(target.meaning for target in comparison.targets if target.meaning)]


def shared_settings(comparison: Comparison) -> dict[str, str]:
    """Return the most important settings that are the same in all rows."""
    shared = {}
    for name in _SHARED:
        values = {run[name] for row in comparison.rows for run in row.configuration.runs}
        if len(values) == 1 and values != {None} and (name, values) != ("hosts", {1}):
            shared[name] = format_value(name, values.pop())
    return shared


def _title(comparison: Comparison) -> str:
    if comparison.metric.name == "test_accuracy":
        return f"test accuracy: every row against {comparison.baseline.title}"
    heading = _heading(comparison.metric.name, comparison.targets[0]).replace("\n", " ")
    better = "faster" if comparison.is_about_speed else "better"
    return f"{heading}: every row against {comparison.baseline.title} (above 1x is {better})"


def _answer_cells(comparison: Comparison, row: Row, extra: Sequence[str]) -> list[tuple[Column, Cell]]:
    metric, target, configuration = comparison.metric.name, comparison.targets[0], row.configuration
    further = [
        (
            Column(heading=f"{_gain_word(comparison)}\nto {each.title}"),
            _further_cell(row.further[i] if row.further else None, each, interval=False),
        )
        for i, each in enumerate(comparison.targets[1:])
        if comparison.is_to_target
    ]
    shown = {metric, "test_accuracy"}
    means = [name for name in ("payload_bytes_per_step", *extra) if name not in shown]
    return [
        (Column(heading="", align="left", priority=0), Cell(text=_row_name(comparison, configuration))),
        *_uneven_seeds(comparison, configuration),
        *_metric_cells(comparison, row),
        (Column(heading="verdict", align="left"), _verdict_cell(comparison, row, short=True)),
        *further,
        *([] if metric == "test_accuracy" else [(_accuracy_heading(comparison), _short_accuracy_cell(row))]),
        *(
            (
                Column(heading=_SHORT_HEADINGS.get(name) or _heading(name, target)),
                _value_cell(configuration, name, target),
            )
            for name in dict.fromkeys(means)
            if not (further and name not in extra)  # several targets take their place
        ),
    ]


def _row_name(comparison: Comparison, configuration: Configuration) -> str:
    """Return the title, without the components if these are the same in all rows."""
    if not _named_by_settings(comparison):
        return configuration.title
    return configuration.named(name for name in configuration.named_by or () if name not in _COMPONENTS)


def _named_by_settings(comparison: Comparison) -> bool:
    """Return True if all rows have the same components and differ only in settings."""
    shared, named_by = _shared_components(comparison), comparison.baseline.named_by or ()
    return (
        bool(shared)
        and all(name in shared for name in named_by if name in _COMPONENTS)
        and shared.keys() < set(named_by)
    )


def _shared_components(comparison: Comparison) -> dict[str, str]:
    labels = [row.configuration.label for row in comparison.rows]
    return {
        name: format_value(name, labels[0][name])
        for name in _COMPONENTS
        if name in labels[0] and len({label[name] for label in labels}) == 1
    }


def _uneven_seeds(comparison: Comparison, configuration: Configuration) -> list[tuple[Column, Cell]]:
    """Return the column of seeds if rows differ in it or runs failed; otherwise the subtitle shows the number."""
    return [] if _num_seeds(comparison) else [(Column(heading="seeds"), _seeds_cell(configuration, "{}/{}"))]


def _num_seeds(comparison: Comparison) -> int | None:
    """Return the number of seeds, or None if it differs between rows or a run failed."""
    counts = {(len(row.configuration.ok), len(row.configuration.runs)) for row in comparison.rows}
    ok, runs = counts.pop()
    return ok if not counts and ok == runs else None


def _metric_cells(comparison: Comparison, row: Row) -> list[tuple[Column, Cell]]:
    metric, target = comparison.metric.name, comparison.targets[0]
    if metric == "test_accuracy":
        return [
            (Column(heading="accuracy\n% ± sd"), _accuracy_cell(row.configuration)),
            (Column(heading=f"points vs {_baseline_word(comparison)}\n[95% CI]"), _points_cell(row)),
        ]
    return [
        (Column(heading=_heading(metric, target)), _value_cell(row.configuration, metric, target)),
        (Column(heading=_gain_heading(comparison)), _gain_cell(row)),
    ]


def _accuracy_heading(comparison: Comparison) -> Column:
    return Column(heading=f"accuracy %\n(vs {_baseline_word(comparison)})")


def _short_accuracy_cell(row: Row) -> Cell:
    """Return a cell such as ``97.2 (-1.0)``: the mean, and its difference from the baseline in percentage points."""
    known, effect = row.configuration.estimate("test_accuracy"), row.accuracy.effect
    if known is None:
        return Cell()
    change = f" ({format_points(effect.value)})" if effect else ""
    style = _STYLES.get(row.accuracy.verdict, "") if effect else ""
    return Cell(text=f"{known.mean * 100:.1f}{change}", style=style)


def _cells(comparison: Comparison, row: Row, extra: Sequence[str]) -> list[tuple[Column, Cell]]:
    configuration = row.configuration
    named = [
        (Column(heading=name, align="left", priority=0), Cell(text=format_value(name, value), raw={name: value}))
        for name, value in configuration.label.items()
    ]
    return [
        *named,
        (Column(heading="seeds"), _seeds_cell(configuration)),
        *_judged_cells(comparison, row),
        *_cells_of_further_targets(comparison, row),
        *_mean_cells(comparison, configuration, extra),
        *_tuning_cells(comparison, configuration),
        (Column(heading="in sync", priority=2), _sync_cell(configuration)),
    ]


def _judged_cells(comparison: Comparison, row: Row) -> list[tuple[Column, Cell]]:
    metric, target = comparison.metric.name, comparison.targets[0]
    cells = []
    if metric != "test_accuracy":
        heading = f"{_heading(metric, target)}\n[95% CI]"
        cells.append((Column(heading=heading, priority=2), _value_cell(row.configuration, metric, target, True)))
        cells.append((Column(heading=_gain_heading(comparison)), _gain_cell(row)))
    return [
        *cells,
        (Column(heading="verdict", align="left"), _verdict_cell(comparison, row)),
        (Column(heading="accuracy\n% ± sd"), _accuracy_cell(row.configuration)),
        (Column(heading="accuracy vs baseline\npoints [95% CI]", priority=3), _accuracy_difference_cell(row)),
    ]


def _cells_of_further_targets(comparison: Comparison, row: Row) -> list[tuple[Column, Cell]]:
    if not comparison.is_to_target:
        return []
    metric, cells = comparison.metric.name, []
    for i, target in enumerate(comparison.targets[1:]):
        needed = Column(heading=_heading(metric, target), priority=2)
        cells.append((needed, _value_cell(row.configuration, metric, target)))
        finding = row.further[i] if row.further else None
        gain = Column(heading=f"{_gain_heading(comparison)} to {target.title}", priority=2)
        cells.append((gain, _further_cell(finding, target)))
    return cells


def _mean_cells(
    comparison: Comparison, configuration: Configuration, extra: Sequence[str]
) -> list[tuple[Column, Cell]]:
    target = comparison.targets[0]
    to_target = [targets.BYTES] if target.accuracy is not None else []
    shown = dict.fromkeys([*_MEANS, *to_target, *extra])
    cells = []
    if comparison.metric.name != "samples_per_s":
        heading = f"{_heading('samples_per_s', target)}\n[95% CI]"
        cells.append((Column(heading=heading, priority=4), _value_cell(configuration, "samples_per_s", target, True)))
    for name in shown:
        if name not in (comparison.metric.name, "samples_per_s"):
            priority = 3 if name in (*_FIRST_MEANS, *extra) else 4
            to_reach = comparison.targets if name in targets.TO_TARGET else [target]
            for each in to_reach:
                column = Column(heading=_heading(name, each), priority=priority)
                cells.append((column, _value_cell(configuration, name, each)))
    return cells


def _seeds_cell(configuration: Configuration, form: str = "{}/{} ok") -> Cell:
    ok, runs = len(configuration.ok), len(configuration.runs)
    ids = configuration.distinct("config_id")
    return Cell(
        text=form.format(ok, runs),
        raw={"num_seeds": runs, "num_ok": ok, "config_id": ids[0] if len(ids) == 1 else None},
        style="" if ok == runs else "red",
    )


def _value_cell(configuration: Configuration, name: str, target: Target, interval: bool = False) -> Cell:
    """Return the mean of a column over seeds, with its interval if ``interval`` is True."""
    if name in targets.TO_TARGET:
        return _need_cell(configuration, name, target, interval)
    known = configuration.estimate(name)
    raw = _estimate_raw(name, known, interval)
    if name == "payload_bytes_per_step":
        raw["payload_bytes_source"] = "+".join(configuration.distinct("payload_bytes_source")) or None
    return Cell(text=_estimate_text(name, known, interval, _mark(configuration, name)), raw=raw)


def _need_cell(configuration: Configuration, name: str, target: Target, interval: bool) -> Cell:
    """Return the mean time or bytes to a target, and how many seeds reached it unless all did."""
    seeds = targets.needs(configuration, name, target)
    reached = targets.num_reached(seeds)
    known = targets.mean_need(seeds)
    suffix = "" if target.accuracy is None else f"_{target.accuracy:g}"
    raw = _estimate_raw(f"{name}{suffix}", known, interval)
    if name == targets.TIME:  # the bytes may be known for fewer seeds
        raw |= {
            f"num_reached{suffix}": reached if seeds else None,
            f"num_missed{suffix}": len(seeds) - reached if seeds else None,
        }
    missed = "" if reached == len(seeds) else "≥"
    text = _estimate_text(name, known, interval, missed + _mark(configuration, name))
    if reached < len(seeds):
        text = f"{text if known else 'miss'} ({reached}/{len(seeds)})"
    return Cell(text=text, raw=raw)


def _estimate_raw(name: str, known: Estimate | None, interval: bool) -> dict[str, Raw]:
    raw: dict[str, Raw] = {name: known.mean if known else None}
    if interval:
        raw |= {
            f"{name}_low": _not_negative(known.low if known else None),
            f"{name}_high": known.high if known else None,
        }
    return raw


def _estimate_text(name: str, known: Estimate | None, interval: bool, mark: str) -> str:
    if known is None:
        return NOTHING
    text = mark + _value(name, known.mean)
    if not interval:
        return text
    bounds = (_not_negative(known.low), known.high)
    return format_interval(text, *(None if bound is None else format_bound(name, bound, text) for bound in bounds))


def _not_negative(bound: float | None) -> float | None:
    return None if bound is None else max(bound, 0.0)  # these quantities are never negative


def _mark(configuration: Configuration, name: str) -> str:
    """Return ``~`` if bytes were computed or estimated, not counted."""
    formula = name in _OF_PAYLOAD and "formula" in configuration.distinct("payload_bytes_source")
    estimated = name.startswith("wire_bytes") and "estimated" in configuration.distinct("wire_headers")
    return "~" if formula or estimated else ""


def _baseline_word(comparison: Comparison) -> str:
    compressors = comparison.baseline.distinct("compressor")
    return compressors[0].partition(":")[0] if len(compressors) == 1 else "baseline"


def _gain_word(comparison: Comparison) -> str:
    return "speed-up" if comparison.is_about_speed else "improvement"


def _gain_heading(comparison: Comparison) -> str:
    return f"{_gain_word(comparison)}\nvs {_baseline_word(comparison)} [95% CI]"


def _gain_cell(row: Row) -> Cell:
    finding = row.gain
    raw = {**_effect_raw("gain", finding.effect), "gain_p_adjusted": finding.p}
    if finding.verdict == "baseline":
        return Cell(text="1.00x", raw=raw, style="dim")
    return Cell(text=_factor_text(finding.effect), raw=raw)


def _further_cell(finding: Finding | None, target: Target, *, interval: bool = True) -> Cell:
    effect = finding.effect if finding else None
    suffix = f"_{target.accuracy:g}"
    raw = {
        **_effect_raw(f"gain{suffix}", effect),
        f"gain_p_adjusted{suffix}": finding.p if finding else None,
        f"verdict{suffix}": finding.verdict if finding else "baseline",
    }
    if finding is None:
        return Cell(text="1.00x", raw=raw, style="dim")
    factor = "" if effect is None else _factor_text(effect) if interval else f"{format_factor(effect.value)}x"
    return Cell(text=f"{factor} {finding.verdict}".strip(), raw=raw, style=_STYLES.get(finding.verdict, ""))


def _factor_text(effect: Effect | None) -> str:
    if effect is None:
        return NOTHING
    low, high = (None if bound is None else format_factor(bound) for bound in (effect.low, effect.high))
    return format_interval(f"{format_factor(effect.value)}x", low, high)


def _verdict_cell(comparison: Comparison, row: Row, *, short: bool = False) -> Cell:
    text: str = row.verdict
    if row.verdict == "unclear" and not short:
        if min(len(row.configuration.ok), len(comparison.baseline.ok)) == 1:
            text = "unclear, n=1"
        elif comparison.is_to_target and (_any_missed(comparison, row.configuration)):
            text = "unclear, miss"
        elif row.only_wall_clock_is_noisy:
            text = f"unclear, CPU {row.cpu.verdict}"
    raw: dict[str, Raw] = {"verdict": row.verdict, "cpu_verdict": row.cpu.verdict if row.cpu.effect else None}
    return Cell(text=text, raw=raw, style=_STYLES.get(row.verdict, ""))


def _any_missed(comparison: Comparison, configuration: Configuration) -> bool:
    seeds = targets.needs(configuration, comparison.metric.name, comparison.targets[0])
    return targets.num_reached(seeds) < len(seeds)


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
    raw = {
        **_effect_raw("accuracy_difference", row.accuracy.effect),
        "accuracy_p_adjusted": row.accuracy.p,
        "accuracy_verdict": row.accuracy.verdict,
    }
    cell = _points_cell(row)
    text = f"{cell.text} {row.accuracy.verdict}" if row.accuracy.effect else cell.text
    return Cell(text=text, raw=raw, style=cell.style)


def _points_cell(row: Row) -> Cell:
    effect = row.accuracy.effect
    if effect is None:
        return Cell()
    low, high = (None if bound is None else format_points(bound) for bound in (effect.low, effect.high))
    return Cell(
        text=format_interval(format_points(effect.value), low, high), style=_STYLES.get(row.accuracy.verdict, "")
    )


def _tuning_cells(comparison: Comparison, configuration: Configuration) -> list[tuple[Column, Cell]]:
    """Return the column with the number of learning rates that were tried, if any row was tuned."""
    if not any(tried for row in comparison.rows for tried in row.configuration.distinct("rates_tried")):
        return []
    known = configuration.distinct("rates_tried")
    raw: dict[str, Raw] = {"rates_tried": known[0] if len(known) == 1 else None}
    return [(Column(heading="rates\ntried", priority=3), Cell(text="/".join(map(str, known)) or NOTHING, raw=raw))]


def _sync_cell(configuration: Configuration) -> Cell:
    known = [run.in_sync for run in configuration.runs if run.in_sync is not None]
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


def _heading(name: str, target: Target) -> str:
    if name in targets.TO_TARGET:
        return f"{'time' if name == targets.TIME else 'bytes'} to\n{target.title}"
    return _HEADINGS.get(name, name)


def _value(name: str, value: float) -> str:
    return f"{format_number(value)}x" if name == "compression_ratio" else format_value(name, value)
