"""Build the tables of a comparison: one with every column, and a short one for the terminal.

Each column is declared as a pair: its heading, and a function that makes the column's cell in a compared row.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bench.core.errors import UsageError
from bench.report import targets
from bench.report.columns import (
    COLUMNS_BY_NAME,
    NOTHING,
    find_numbers,
    format_bound,
    format_effect,
    format_factor,
    format_interval,
    format_number,
    format_points,
    format_value,
)
from bench.report.comparison import ComparedRow, Comparison, ComparisonVerdict
from bench.report.groups import COMPONENTS, name_of
from bench.report.quality import BITS_PER_BYTE, Metric, yardsticks
from bench.report.statistics import Effect, MeanEstimate
from bench.report.tables import Raw, Table, TableCell, TableColumn, table_of
from bench.report.targets import Target
from bench.report.verdict import in_lines
from collectives.options import did_you_mean

_HEADINGS = {
    "samples_per_s": "samples/s",
    "test_accuracy": "accuracy, %",
    "test_bits_per_byte": "bits per byte",
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
# Columns whose means are shown after the columns of the verdict; the metric itself is not repeated there.
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
_STYLES: dict[ComparisonVerdict, str] = {
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

Declared = tuple[TableColumn, Callable[[ComparedRow], TableCell]]


def comparison_table(comparison: Comparison, *, extra: Sequence[str] = (), cautions: Sequence[str] = ()) -> Table:
    """Return the table with every column, and one row per configuration; the baseline is the first row.

    Args:
        comparison: the comparison to show.
        extra: names of further columns to show as means.
        cautions: warnings to show above the table.
    """
    metric, target, quality = comparison.metric.name, comparison.targets[0], comparison.quality
    gain = "{}\nvs {} [95% CI]".format(*_words(comparison))
    columns: list[Declared] = [
        *((TableColumn(name, "left", 0), partial(_label_cell, name)) for name in comparison.baseline.label),
        (TableColumn("seeds"), partial(_seeds_cell, "{}/{} ok")),
    ]
    if not comparison.is_about_quality:
        columns += [_mean(metric, target, 2, interval=True), (TableColumn(gain), _gain_cell)]
    columns += [
        (TableColumn("verdict", "left"), partial(_verdict_cell, comparison, with_reason=True)),
        (TableColumn(f"{quality.noun}\n{'% ' if quality.is_share else ''}± sd"), partial(_quality_cell, quality)),
        (
            TableColumn(f"{quality.noun} vs baseline\n{quality.unit} [95% CI]", priority=3),
            partial(_change_cell, quality, with_verdict=True),
        ),
    ]
    for number, further in enumerate(comparison.targets[1:] if comparison.is_to_target else ()):
        cell = partial(_further_cell, number, further, interval=True)
        columns += [_mean(metric, further, 2), (TableColumn(f"{gain} to {further.title}", priority=2), cell)]
    if metric != "samples_per_s":
        columns.append(_mean("samples_per_s", target, 4, interval=True))
    for name in dict.fromkeys([*_MEANS, *([targets.BYTES] if target.value is not None else []), *extra]):
        priority = 3 if name in (*_FIRST_MEANS, *extra) else 4
        to_reach = comparison.targets if name in targets.TO_TARGET else [target]
        columns += [_mean(name, each, priority) for each in to_reach if name not in (metric, "samples_per_s")]
    if any(tried for group in comparison.groups for tried in group.distinct("rates_tried")):
        columns.append((TableColumn("rates\ntried", priority=3), _rates_cell))
    columns.append((TableColumn("in sync", priority=2), _sync_cell))
    return _table(comparison, columns, shared_settings(comparison), cautions)


def answer_table(comparison: Comparison, *, extra: Sequence[str] = (), cautions: Sequence[str] = ()) -> Table:
    """Return the short table for people: at most 7 columns, and the extra columns.

    Args:
        comparison: the comparison to show.
        extra: names of further columns to show as means.
        cautions: warnings to show above the table.
    """
    metric, target, quality = comparison.metric.name, comparison.targets[0], comparison.quality
    gain, baseline = _words(comparison)
    settings = _components_above(comparison)
    names = [name for name in comparison.baseline.named_by or () if name not in COMPONENTS] if settings else None
    settings |= shared_settings(comparison)
    columns: list[Declared] = [
        (
            TableColumn("", "left", 0),
            lambda row: TableCell(
                text=row.group.title if names is None else name_of(row.group.label, names),
                raw={**row.group.label, **_seeds_cell("", row).raw},
            ),
        )
    ]
    (ok, runs), *other_counts = {(len(group.ok), len(group.runs)) for group in comparison.groups}
    if other_counts or ok < runs:
        columns.append((TableColumn("seeds"), partial(_seeds_cell, "{}/{}")))
    else:
        settings["seeds"] = f"{ok} each" if len(comparison.rows) > 1 else str(ok)
    if comparison.is_about_quality:
        columns += [
            (TableColumn(f"{quality.noun}\n{'% ' if quality.is_share else ''}± sd"), partial(_quality_cell, quality)),
            (
                TableColumn(f"{quality.unit} vs {baseline}\n[95% CI]"),
                partial(_change_cell, quality, with_verdict=False),
            ),
        ]
    else:
        columns += [_mean(metric, target), (TableColumn(f"{gain}\nvs {baseline} [95% CI]"), _gain_cell)]
    columns.append((TableColumn("verdict", "left"), partial(_verdict_cell, comparison, with_reason=False)))
    further = comparison.targets[1:] if comparison.is_to_target else []
    columns += [
        (
            TableColumn(f"{gain}\nto {each.title}"),
            partial(_further_cell, number, each, interval=False),
        )
        for number, each in enumerate(further)
    ]
    if not comparison.is_about_quality:
        heading = f"{quality.noun} %\n(vs {baseline})" if quality.is_share else f"{quality.noun}\n(% vs {baseline})"
        columns.append((TableColumn(heading), partial(_short_quality_cell, quality)))
    for name in dict.fromkeys(["payload_bytes_per_step", *extra]):
        # Columns for further targets replace the bytes per step.
        if name not in (metric, quality.column) and (name in extra or not further):
            columns.append(_mean(name, target, heading="sent/\nstep" if name == "payload_bytes_per_step" else ""))
    return _table(comparison, columns, settings, cautions)


def only_columns(comparison: Comparison, names: Sequence[str], *, cautions: Sequence[str] = ()) -> Table:
    """Return the table with the columns that name a row, then these columns, in this order.

    Args:
        comparison: the comparison to show.
        names: names of columns: those of `comparison_table` by the name of one of their values, or any with numbers.
        cautions: warnings to show above the table.

    Raises:
        UsageError: a column does not exist, or holds no numbers.
    """
    known = _places(comparison_table(comparison))
    extra = [name for name in names if name not in known]
    if unknown := [name for name in extra if name not in COLUMNS_BY_NAME]:
        raise UsageError(
            f"there is no column '{unknown[0]}'{did_you_mean(unknown[0], [*known, *COLUMNS_BY_NAME])}; choose among "
            f"{', '.join(known)}, or those that docs/columns.md gives numbers"
        )
    wanted = [each for name in names for each in ([name] if name in known else find_numbers([name]))]
    table = comparison_table(comparison, extra=[name for name in wanted if name not in known], cautions=cautions)
    places, naming = _places(table), [i for i, column in enumerate(table.columns) if column.priority == 0]
    if absent := [name for name in wanted if name not in places]:
        raise UsageError(f"this comparison has no column '{absent[0]}'; choose among {', '.join(places)}")
    chosen = [*naming, *(place for name in wanted if (place := places[name]) not in naming)]
    shown = [dataclasses.replace(table.columns[i], priority=min(table.columns[i].priority, 1)) for i in chosen]
    rows = [[row[i] for i in chosen] for row in table.rows]
    notes = _notes(comparison, [cell.text for row in rows for cell in row])
    return dataclasses.replace(table, columns=shown, rows=rows, notes=notes)


def _places(table: Table) -> dict[str, int]:
    # Return the number of the first column that contains each value, by the value's name.
    places: dict[str, int] = {}
    for row in table.rows:
        for number, cell in enumerate(row):
            for name in cell.raw:
                places.setdefault(name, number)
    return places


def _table(
    comparison: Comparison, columns: Sequence[Declared], settings: Mapping[str, str], cautions: Sequence[str]
) -> Table:
    heading, above = f"test {comparison.quality.noun}", ""
    if not comparison.is_about_quality:
        heading = _heading(comparison.metric.name, comparison.targets[0]).replace("\n", " ")
        above = f" (above 1x is {'faster' if comparison.is_about_speed else 'better'})"
    table = table_of(
        columns,
        comparison.rows,
        cautions=cautions,
        answer=in_lines(comparison),
        title=f"{heading}: every row against {comparison.baseline.title}{above}",
        subtitle=" ".join(f"{name}={value}" for name, value in settings.items()),
    )
    return dataclasses.replace(table, notes=_notes(comparison, [cell.text for cells in table.rows for cell in cells]))


def _notes(comparison: Comparison, texts: Sequence[str]) -> list[str]:
    interval = "[low, high]: 95 % interval over seeds"
    if comparison.rule == "anytime":
        interval += ", valid after each added seed (rule: anytime)"
    signs = {
        interval: any("[" in text for text in texts),
        "±: standard deviation over seeds": any("±" in text for text in texts),
        "~: from a formula, or estimated": any(text.lstrip("≥").startswith("~") for text in texts),
    }
    at_least = (
        "≥ (reached/seeds): seeds that missed the target count with everything that they spent, so the mean is at "
        "least this; two rows are compared up to the smallest budget of any of their seeds"
    )
    notes = ["; ".join(sign for sign, is_used in signs.items() if is_used)]
    notes += [at_least] if any(text.startswith("≥") for text in texts) else []
    if comparison.quality is BITS_PER_BYTE:
        notes.append(yardsticks(run.last_known for group in comparison.groups for run in group.runs))
    return list(filter(None, [*notes, *(target.meaning for target in comparison.targets)]))


def shared_settings(comparison: Comparison) -> dict[str, str]:
    """Return the most important settings that are equal in all rows, as texts by the name of the setting."""
    shared = {}
    for name in _SHARED:
        values = {run[name] for group in comparison.groups for run in group.runs}
        if len(values) == 1 and values != {None} and (name, values) != ("hosts", {1}):
            shared[name] = format_value(name, values.pop())
    return shared


def _components_above(comparison: Comparison) -> dict[str, str]:
    # Return the components if all rows have the same ones and differ only in settings; otherwise nothing.
    labels, named_by = [group.label for group in comparison.groups], set(comparison.baseline.named_by or ())
    shared = {
        name: format_value(name, labels[0][name])
        for name in COMPONENTS
        if name in labels[0] and len({label[name] for label in labels}) == 1
    }
    return shared if named_by & set(COMPONENTS) <= shared.keys() < named_by else {}


def _heading(name: str, target: Target) -> str:
    if name in targets.TO_TARGET:
        return f"{'time' if name == targets.TIME else 'bytes'} to\n{target.title}"
    return _HEADINGS.get(name, name)


def _words(comparison: Comparison) -> tuple[str, str]:
    # Return two words for headings: the name of an effect on the metric, and the name of the baseline.
    compressors = comparison.baseline.distinct("compressor")
    baseline = compressors[0].partition(":")[0] if len(compressors) == 1 else "baseline"
    return "speed-up" if comparison.is_about_speed else "improvement", baseline


def _mean(name: str, target: Target, priority: int = 1, *, heading: str = "", interval: bool = False) -> Declared:
    # Declare a column with the mean over seeds of a column of metrics.csv, or of the time or bytes to a target.
    lines = [heading or _heading(name, target), *(["[95% CI]"] if interval else [])]
    return TableColumn("\n".join(lines), priority=priority), partial(_mean_cell, name, target, interval)


def _mean_cell(name: str, target: Target, interval: bool, row: ComparedRow) -> TableCell:
    # Show the mean over seeds. For time or bytes to a target, also show how many seeds reached it, unless all did.
    group, is_to_target, suffix = row.group, name in targets.TO_TARGET, _suffix(target)
    seeds = targets.needs(group, name, target) if is_to_target else []
    known = targets.mean_need(seeds) if is_to_target else group.estimate(name)
    reached = targets.num_reached(seeds)
    missed = len(seeds) - reached
    key = name + suffix if is_to_target else name
    raw: dict[str, Raw] = {key: known.mean if known else None}
    low, high = (known.low, known.high) if known and interval else (None, None)
    if interval:
        low = None if low is None else max(low, 0.0)  # these quantities are never negative
        raw |= {f"{key}_low": low, f"{key}_high": high}
    if name == targets.TIME:  # not for the bytes to a target, which may be known for fewer seeds
        raw |= {f"num_reached{suffix}": reached if seeds else None, f"num_missed{suffix}": missed if seeds else None}
    elif name == "payload_bytes_per_step":
        raw["payload_bytes_source"] = "+".join(group.distinct("payload_bytes_source")) or None
    text = "miss" if missed else NOTHING
    if known is not None:
        is_computed = name in _OF_PAYLOAD and "formula" in group.distinct("payload_bytes_source")
        is_computed |= name.startswith("wire_bytes") and "estimated" in group.distinct("wire_headers")
        mean = f"{format_number(known.mean)}x" if name == "compression_ratio" else format_value(name, known.mean)
        text = f"{'≥' if missed else ''}{'~' if is_computed else ''}{mean}"
        text = format_interval(text, *(None if b is None else format_bound(name, b, text) for b in (low, high)))
    return TableCell(text=f"{text} ({reached}/{len(seeds)})" if missed else text, raw=raw)


def _suffix(target: Target) -> str:
    return "" if target.value is None else f"_{target.value:g}"


def _label_cell(name: str, row: ComparedRow) -> TableCell:
    value = row.group.label[name]
    return TableCell(text=format_value(name, value), raw={name: value})


def _seeds_cell(form: str, row: ComparedRow) -> TableCell:
    ok, runs = len(row.group.ok), len(row.group.runs)
    ids = row.group.distinct("config_id")
    return TableCell(
        text=form.format(ok, runs),
        raw={"num_seeds": runs, "num_ok": ok, "config_id": ids[0] if len(ids) == 1 else None},
        style="" if ok == runs else "red",
    )


def _gain_cell(row: ComparedRow) -> TableCell:
    raw = _effect_raw("gain", row.gain.effect) | {"gain_p_adjusted": row.gain.p}
    if row.gain.verdict == "baseline":
        return TableCell(text="1.00x", raw=raw, style="dim")
    return TableCell(text=format_effect(row.gain.effect, format_factor, "x"), raw=raw)


def _further_cell(number: int, target: Target, row: ComparedRow, *, interval: bool) -> TableCell:
    finding, suffix = row.further[number], _suffix(target)
    raw = _effect_raw(f"gain{suffix}", finding.effect)
    raw |= {f"gain_p_adjusted{suffix}": finding.p, f"verdict{suffix}": finding.verdict}
    text: str = "1.00x" if finding.verdict == "baseline" else finding.verdict
    if finding.effect:
        effect = finding.effect if interval else dataclasses.replace(finding.effect, low=None, high=None)
        text = f"{format_effect(effect, format_factor, 'x')} {finding.verdict}"
    return TableCell(text=text, raw=raw, style=_STYLES.get(finding.verdict, ""))


def _effect_raw(name: str, effect: Effect | None) -> dict[str, Raw]:
    value, low, high = (effect.value, effect.low, effect.high) if effect else (None, None, None)
    return {name: value, f"{name}_low": low, f"{name}_high": high}


def _verdict_cell(comparison: Comparison, row: ComparedRow, *, with_reason: bool) -> TableCell:
    # Show the verdict; if wanted, add the reason to an unclear verdict.
    reason = ""
    if with_reason and row.gain.verdict == "unclear":
        metric, target = comparison.metric.name, comparison.targets[0]
        seeds = targets.needs(row.group, metric, target) if comparison.is_to_target else []
        if min(len(row.group.ok), len(comparison.baseline.ok)) == 1:
            reason = ", n=1"
        elif targets.num_reached(seeds) < len(seeds):
            reason = ", miss"
        elif row.only_wall_clock_is_noisy:
            reason = f", CPU {row.cpu.verdict}"
    raw: dict[str, Raw] = {"verdict": row.gain.verdict, "cpu_verdict": row.cpu.verdict if row.cpu.effect else None}
    return TableCell(text=f"{row.gain.verdict}{reason}", raw=raw, style=_STYLES.get(row.gain.verdict, ""))


def _estimate(quality: Metric, row: ComparedRow) -> MeanEstimate | None:
    return row.group.estimate(quality.column) if row.group.quality is quality else None


def _quality_cell(quality: Metric, row: ComparedRow) -> TableCell:
    known = _estimate(quality, row)
    mean, sd = (known.mean, known.sd) if known else (None, None)
    texts = [] if mean is None else [quality.in_table(value) for value in (mean, sd) if value is not None]
    return TableCell(text=" ± ".join(texts) or NOTHING, raw={quality.column: mean, f"{quality.column}_sd": sd})


def _short_quality_cell(quality: Metric, row: ComparedRow) -> TableCell:
    # Show the mean, and its change from the baseline in points or per cent, such as ``97.2 (-1.0)``.
    known, effect = _estimate(quality, row), row.accuracy.effect
    if known is None:
        return TableCell()
    change = f" ({format_points(effect.value)})" if effect else ""
    changed = _change_cell(quality, row, with_verdict=False)
    raw = {quality.column: known.mean, **changed.raw}
    return dataclasses.replace(changed, text=f"{quality.in_table(known.mean)}{change}", raw=raw)


def _change_cell(quality: Metric, row: ComparedRow, *, with_verdict: bool) -> TableCell:
    # Show the change from the baseline in points or per cent, with its interval and, if wanted, the verdict.
    effect, verdict = row.accuracy.effect, row.accuracy.verdict
    raw = _effect_raw(f"{quality.name}_difference", effect)
    raw |= {f"{quality.name}_p_adjusted": row.accuracy.p, f"{quality.name}_verdict": verdict}
    text = format_effect(effect, format_points)
    style = _STYLES.get(verdict, "") if effect else ""
    return TableCell(text=f"{text} {verdict}" if effect and with_verdict else text, raw=raw, style=style)


def _rates_cell(row: ComparedRow) -> TableCell:
    known = row.group.distinct("rates_tried")
    raw: dict[str, Raw] = {"rates_tried": known[0] if len(known) == 1 else None}
    return TableCell(text="/".join(map(str, known)) or NOTHING, raw=raw)


def _sync_cell(row: ComparedRow) -> TableCell:
    known = [run.in_sync for run in row.group.runs if run.in_sync is not None]
    in_sync = all(known) if known else None
    text = {None: NOTHING, True: "yes", False: "NO"}[in_sync]
    return TableCell(text=text, raw={"replicas_in_sync": in_sync}, style="bold red" if in_sync is False else "")
