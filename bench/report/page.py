"""Write the HTML report: one self-contained file for the screen or for printing."""

from __future__ import annotations

import collections
import dataclasses
import json
import shlex
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from bench.core.environment import version_of
from bench.core.rows import Warn
from bench.core.schema.metrics import METRICS_BY_NAME
from bench.report import caveats
from bench.report.columns import format_value
from bench.report.comparison import NoSuchBaseline, compare
from bench.report.comparison_table import comparison_table, shared_settings
from bench.report.groups import by_workload
from bench.report.plots import style
from bench.report.plots.kinds import FileKind, kinds
from bench.report.plots.results import NotDrawable, Results
from bench.report.store import Row, collect_runs
from bench.report.tables import Table, TableCell, TableColumn
from bench.report.verdict import in_sentences

_FEW = 3  # from this many values on, a sentence shows only their range
_MACHINE = ("host", "cpu", "device", "threads", "torch_version", "kernels", "git_sha", "git_dirty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The contents of the report for one workload.

    Attributes:
        label: the settings that distinguish the workload from others; empty if it is the only one.
        answer: the verdict in one sentence.
        evidence: a sentence for each row.
        shared: settings that all rows share.
        tables: one comparison per metric, that of the verdict first.
        caveats: everything that weakens the verdict.
    """

    label: str
    answer: str
    evidence: Sequence[str]
    shared: dict[str, str]
    tables: Sequence[Table]
    caveats: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """The contents of the report in the template's order. The template escapes all texts except the SVG elements.

    Attributes:
        figures: pairs of an ``svg`` element and how to read it.
    """

    question: str
    sections: Sequence[Section]
    figures: Sequence[tuple[str, str]]
    not_drawn: Sequence[str]
    caveats: Sequence[str]
    machines: Table
    versions: Sequence[str]
    commands: Sequence[str]
    version: str | None


def page(
    results: Results,
    environment_files: Sequence[Path],
    left_out: Sequence[str],
    files: Sequence[tuple[FileKind, Path]] = (),
) -> Page:
    """Return the contents of a report.

    Args:
        results: rows, layers and the name of the baseline.
        environment_files: the ``environment.json`` files of the runs that have one.
        left_out: sentences about files that could not be read, which are added to the caveats.
        files: files that are no runs, each with its kind of picture.

    Raises:
        NoSuchBaseline: no row matches the baseline.
    """
    sections = _sections(results)
    figures, not_drawn = _figures(results, files)
    unread: list[str] = []
    environments = _environments(environment_files, unread.append)
    commands = (each["command"] for each in environments if isinstance(each.get("command"), list))
    return Page(
        question=question(results.rows),
        sections=sections,
        figures=figures,
        not_drawn=not_drawn,
        caveats=[sentence for section in sections for sentence in section.caveats] + [*left_out, *unread],
        machines=_machines(results.rows),
        versions=list(dict.fromkeys(map(_versions, environments))),
        commands=list(dict.fromkeys(shlex.join(["bench", *map(str, command[1:])]) for command in commands)),
        version=version_of("gradwire"),
    )


def to_html(content: Page) -> str:
    """Return the report as HTML, with every text from rows and files escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=content)


def question(rows: Sequence[Row]) -> str:
    """Return the question that the report answers, with the models, data sets and links of the rows."""
    models, datasets, links = (_values(rows, name) for name in ("model", "dataset", "uplink_bps"))
    link = f" over links of {links}" if links else ""
    return (
        f"Will compressing gradients make the training of {models or 'the model'} on {datasets or 'the data'} finish "
        f"sooner{link}, without losing accuracy?"
    )


def _values(rows: Sequence[Row], name: str) -> str:
    """Return the values of a column in words, or their range if there are many."""
    values = [format_value(name, value) for value in sorted({row[name] for row in rows} - {None})]
    if len(values) >= _FEW and METRICS_BY_NAME[name].unit:
        return f"{values[0]} to {values[-1]}"
    return " and ".join(values)


def _sections(results: Results) -> list[Section]:
    """Compare the rows of each workload; a workload without the given baseline uses its default one.

    Raises:
        NoSuchBaseline: no workload has the given baseline.
    """
    sections: list[Section] = []
    errors: list[NoSuchBaseline] = []
    workloads = by_workload(results.rows)
    for label, rows in workloads:
        try:
            sections.append(_section(label, rows, results.baseline))
        except NoSuchBaseline as error:
            errors.append(error)
            section = _section(label, rows, None)
            without = f"{label}: no row fits --baseline {results.baseline}, so the default baseline is used"
            sections.append(dataclasses.replace(section, caveats=[without, *section.caveats]))
    if len(errors) == len(workloads):
        raise errors[0]
    return sections


def _section(label: str, rows: Sequence[Row], baseline: str | None) -> Section:
    # Compare time to target and speed, if they were measured, or else accuracy.
    ok = [run for run in collect_runs(rows) if run.ended_well]
    measured = [("time_to_target_s", "target_accuracy"), ("samples_per_s", "samples_per_s")]
    metrics = [metric for metric, column in measured if any(run[column] is not None for run in ok)] or ["test_accuracy"]
    compared = [compare(rows, baseline=baseline, metric=metric) for metric in metrics]
    answer, *evidence = in_sentences(compared[0])
    tables = [comparison_table(comparison).without_empty_columns() for comparison in compared]
    before = f"{label}: " if label else ""
    return Section(
        label=label,
        answer=answer,
        evidence=evidence,
        shared=shared_settings(compared[0]),
        tables=[dataclasses.replace(table, title=before + table.title) for table in tables],
        caveats=[before + text for text in (*caveats.cautions(compared[0]), *caveats.caveats(compared[0]))],
    )


def _figures(results: Results, files: Sequence[tuple[FileKind, Path]]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the pictures of the rows and of other files, and the reasons why other pictures are missing."""
    drawn, not_drawn = [], []
    for name, kind in kinds().items():
        try:
            drawn.append((style.inline_svg(kind.draw(results), name), kind.reading))
        except NotDrawable as error:
            not_drawn.append(str(error))
    for number, (file_kind, file) in enumerate(files):
        try:
            svg = style.inline_svg(file_kind.draw(file, results.methods), f"{file_kind.name}-{number}")
            drawn.append((svg, f"{file_kind.reading} Drawn from {file}."))
        except NotDrawable as error:
            not_drawn.append(str(error))
    return drawn, not_drawn


def _machines(rows: Sequence[Row]) -> Table:
    """Return a table with one row per machine and version of the code, and the number of runs."""
    groups = collections.Counter(tuple(run[name] for name in _MACHINE) for run in collect_runs(rows))
    texts = [[*map(format_value, _MACHINE, values), str(num_runs)] for values, num_runs in groups.items()]
    return Table(
        title="Machines and versions",
        columns=[*(TableColumn(name, "left", int(name != "host")) for name in _MACHINE), TableColumn("runs")],
        rows=[[TableCell(text=text) for text in row] for row in texts],
    )


def _environments(files: Sequence[Path], warn: Warn) -> list[dict[str, Any]]:
    """Read the environment.json of each run; files that cannot be read are skipped with a warning."""
    environments = []
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            warn(f"{file} is left out: {error}")
            continue
        if isinstance(found, dict):
            environments.append(found)
        else:
            warn(f"{file} is left out: it is not an environment.json of bench")
    return environments


def _versions(environment: dict[str, Any]) -> str:
    """Return the versions of system, Python and packages."""
    packages = environment.get("packages")
    texts = [f"{name} {version}" for name, version in packages.items()] if isinstance(packages, dict) else []
    system, python = environment.get("system", "unknown system"), environment.get("python", "unknown")
    return ", ".join([str(system), f"Python {python}", *texts])
