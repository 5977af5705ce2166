"""Write the page of a system: a fixed text, with computed claims, tables, pictures and origins."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from string import Template

from bench.core.counters import NOTEWORTHY_SHARE
from bench.report.columns import format_bound, format_interval, format_value
from bench.report.plots.kinds import KINDS
from bench.report.plots.results import NotDrawable, Results
from bench.report.plots.style import save
from bench.report.statistics import MeanEstimate, estimate
from bench.report.store import Row, Run
from benchmarks.published.claims import Claim, Judged, Stated, judge
from benchmarks.published.figures import Missing, SweepRuns, Which, in_unit
from benchmarks.published.parts import Drawing, System, Table
from benchmarks.published.sweeps import SWEEPS, Sweep, read_layers_csv

TEXTS = Path(__file__).parent / "texts"
NOTHING = "-"
QUICK = """
**The quick version**: one seed, with shorter and fewer runs than the set-ups say. It shows that everything works, but
its figures are not results.
"""
_SHARES = ("test_accuracy", "train_accuracy")


def write_page(system: System, runs: Mapping[str, SweepRuns], folder: Path, *, quick: bool = False) -> None:
    """Write a system's page and its pictures into a folder that holds the sweeps' CSV files."""
    text = Template((TEXTS / f"{system.name}.md").read_text(encoding="utf-8"))
    page = text.substitute(
        claims=claims_table(system.claims, runs),
        tables="\n\n".join(values_table(table, runs[table.sweep]) for table in system.tables),
        pictures="\n\n".join(_picture(drawing, runs[drawing.sweep], folder) for drawing in system.drawings),
        origin=origin(system.sweeps, runs),
    )
    write_text(page, folder / f"{system.name}.md", quick=quick)


def write_text(page: str, path: Path, *, quick: bool) -> None:
    """Write a page, without links to missing CSV files, and with a notice if it is of the quick version."""
    title, rest = _without_broken_links(page, path.parent).split("\n", 1)
    path.write_text(f"{title}\n{QUICK if quick else ''}{rest}", encoding="utf-8")


def _without_broken_links(page: str, folder: Path) -> str:
    return re.sub(
        r"\[([^\]]+)\]\(([^()/]+\.csv)\)",
        lambda link: link[0] if (folder / link[2]).is_file() else f"`{link[2]}` (not made yet)",
        page,
    )


def outcome(claim: Claim | Stated, runs: Mapping[str, SweepRuns]) -> Judged:
    if isinstance(claim, Stated):
        return Judged(measured=claim.why, verdict=claim.verdict)
    return judge(claim, runs[claim.sweep])


def claims_table(claims: Iterable[Claim | Stated], runs: Mapping[str, SweepRuns]) -> str:
    rows = []
    for claim in claims:
        judged = outcome(claim, runs)
        setup, bound, source = NOTHING, NOTHING, NOTHING
        if isinstance(claim, Claim):
            setup = claim.setup
            bound = f"{claim.claimed.side} {in_unit(claim.claimed.value, claim.unit)}"
            source = f"[{claim.sweep}]({claim.sweep}.csv)"
        rows.append([claim.text, claim.source, setup, bound, judged.measured, judged.verdict, source])
    return markdown_table(
        ["Claim", "Stated in", "Set-up", "Claimed", "Measured, 95 % interval", "Verdict", "Rows"], rows
    )


def values_table(table: Table, runs: SweepRuns) -> str:
    """Return means over seeds with their intervals as a Markdown table."""
    rows = [[name, *_cells(table, _found(runs, which))] for name, which in table.rows]
    heading = ["", *(f"`{column}`" + (" %" if column in _SHARES else "") for column in table.columns), *table.derived]
    notes = [_from(table.sweep), table.note]
    return f"### {table.title}\n\n{markdown_table(heading, rows)}\n\n{' '.join(filter(None, notes))}"


def origin(names: Sequence[str], runs: Mapping[str, SweepRuns]) -> str:
    """Return the origin of the rows of these sweeps: command, number of runs, machine and version."""
    return "\n\n".join(_origin(SWEEPS[name], runs[name]) for name in names)


def markdown_table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heading, [":---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def results_of(runs: SweepRuns, only: Sequence[Which] = ()) -> Results:
    """Return the rows of some configurations in the form that pictures take."""
    kept = [run for which in only for run in _found(runs, which)] if only else runs.runs
    layers = read_layers_csv(runs.path.with_name(f"{runs.path.stem}-layers.csv"))
    rows: list[Row] = [row for run in kept for row in run.rows]
    return Results(rows=rows, layers=layers)


def _found(runs: SweepRuns, which: Which) -> list[Run]:
    try:
        return list(runs.by_seed(which).values())
    except Missing:
        return []


def _cells(table: Table, found: Sequence[Run]) -> list[str]:
    values: dict[str, list[float | None]] = {column: [run[column] for run in found] for column in table.columns}
    values |= {name: [compute(run) for run in found] for name, compute in table.derived.items()}
    return [_cell(name, [float(value) for value in each if value is not None]) for name, each in values.items()]


def _cell(column: str, values: Sequence[float]) -> str:
    known = estimate(values)
    return NOTHING if known is None else interval_text(column, known)


def interval_text(column: str, known: MeanEstimate) -> str:
    """Format a mean with its interval, which is limited to possible values; accuracies are in percent."""
    factor, largest = (100.0, 100.0) if column in _SHARES else (1.0, math.inf)
    text = format_value(column, known.mean * factor)
    bounds = [
        None if bound is None else format_bound(column, min(max(0.0, bound * factor), largest), text)
        for bound in (known.low, known.high)
    ]
    return text if known.low == known.high else format_interval(text, *bounds)


def _picture(drawing: Drawing, runs: SweepRuns, folder: Path) -> str:
    try:
        picture = KINDS[drawing.kind].draw(results_of(runs, drawing.only))
    except NotDrawable as reason:
        return f"(No picture {drawing.name}: {reason}.)"
    save(picture, folder / f"{drawing.name}.svg")
    alt = f"{drawing.kind} of {drawing.sweep}"
    return f"![{alt}]({drawing.name}.svg)\n\n{KINDS[drawing.kind].reading} {_from(drawing.sweep)}"


def _from(sweep: str) -> str:
    return f"From [{sweep}.csv]({sweep}.csv)."


def _origin(sweep: Sweep, runs: SweepRuns) -> str:
    if not runs.runs:
        return f"`{sweep.command}`: not run."
    ended = collections.Counter("ok" if run.ended_well else "failed" for run in runs.runs)
    counts = ", ".join(f"{count} {state}" for state, count in ended.items())
    off = sum(bool(run["link_warnings"]) for run in runs.runs)
    disturbed = sum(max(row["other_cpu_share"] or 0.0 for row in run.rows) > NOTEWORTHY_SHARE for run in runs.runs)
    began = min((run["started_at"] for run in runs.runs if run["started_at"]), default="at an unknown time")
    facts = [
        f"`{sweep.command}`: {counts}, seeds {_values(runs, 'seed')}",
        f"{_values(runs, 'cpu')}, torch {_values(runs, 'torch_version')}, commit {_values(runs, 'git_sha')}",
        f"begun {began}",
        f"rows in [{sweep.name}.csv]({sweep.name}.csv)",
    ]
    if any(run["git_dirty"] for run in runs.runs):
        facts.append("with uncommitted changes")
    if off:
        facts.append(f"in {off} runs a link was not as configured (`link_warnings`)")
    if disturbed:
        facts.append(
            f"in {disturbed} runs other programs took more than {NOTEWORTHY_SHARE:.0%} of the cores "
            "(`other_cpu_share`), so their times are too long"
        )
    return "; ".join(facts) + "."


def _values(runs: SweepRuns, column: str) -> str:
    return ", ".join(format_value(column, value) for value in sorted({run[column] for run in runs.runs} - {None}))
