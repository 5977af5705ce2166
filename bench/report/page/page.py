"""Write the HTML report: one self-contained file for the screen or for printing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from bench.core.environment import version_of
from bench.core.schema.metrics import METRICS_BY_NAME
from bench.report import caveats
from bench.report.comparison import NoSuchBaseline, compare
from bench.report.comparison_table import comparison_table, shared_settings
from bench.report.configurations import format_value
from bench.report.page import origin, verdict
from bench.report.plots.kinds import FileKind, kinds
from bench.report.plots.picture import inline_svg
from bench.report.plots.results import NotDrawable, Results
from bench.report.selection import Workload, by_workload
from bench.report.store import Row, collect_runs
from bench.report.tables import Table

_FEW = 3  # from this many values on, a sentence shows only their range


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture on the page: an ``svg`` element and how to read it."""

    svg: str
    reading: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
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
    """The contents of the report in the template's order. The template escapes all texts except the SVG elements."""

    question: str
    parts: Sequence[Part]
    figures: Sequence[Figure]
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
    parts = _parts(by_workload(results.rows), results.baseline)
    figures, not_drawn = _figures(results, files)
    unread: list[str] = []
    environments = origin.environments(environment_files, unread.append)
    return Page(
        question=question(results.rows),
        parts=parts,
        figures=figures,
        not_drawn=not_drawn,
        caveats=[sentence for part in parts for sentence in part.caveats] + [*left_out, *unread],
        machines=origin.machines(results.rows),
        versions=origin.versions(environments),
        commands=origin.commands(environments),
        version=version_of("gradwire"),
    )


def question(rows: Sequence[Row]) -> str:
    """Return the question that the report answers, with the models, data sets and links of the rows."""
    models, datasets, links = (_values(rows, name) for name in ("model", "dataset", "uplink_bps"))
    link = f" over links of {links}" if links else ""
    return (
        f"Will compressing gradients make the training of {models or 'the model'} on {datasets or 'the data'} finish "
        f"sooner{link}, without losing accuracy?"
    )


def to_html(content: Page) -> str:
    """Return the report as HTML, with every text from rows and files escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=content)


def _parts(workloads: Sequence[Workload], baseline: str | None) -> list[Part]:
    """Compare the rows of each workload; a workload without the given baseline uses its default one.

    Raises:
        NoSuchBaseline: no workload has the given baseline.
    """
    parts: list[Part | NoSuchBaseline] = []
    for workload in workloads:
        try:
            parts.append(_part(workload, baseline))
        except NoSuchBaseline as error:
            parts.append(error)
    lacking = [each for each in parts if isinstance(each, NoSuchBaseline)]
    if len(lacking) == len(workloads):
        raise lacking[0]
    return [
        _part_without(workload, baseline) if isinstance(part, NoSuchBaseline) else part
        for workload, part in zip(workloads, parts, strict=True)
    ]


def _part_without(workload: Workload, baseline: str | None) -> Part:
    part = _part(workload, None)
    without = f"{part.label}: no row fits --baseline {baseline}, so the default baseline is used"
    return dataclasses.replace(part, caveats=[without, *part.caveats])


def _part(workload: Workload, baseline: str | None) -> Part:
    compared = [compare(workload.rows, baseline=baseline, metric=metric) for metric in _metrics(workload.rows)]
    answer, *evidence = verdict.in_words(compared[0])
    tables = [comparison_table(comparison).without_empty_columns() for comparison in compared]
    before = f"{workload.label}: " if workload.label else ""
    return Part(
        label=workload.label,
        answer=answer,
        evidence=evidence,
        shared=shared_settings(compared[0]),
        tables=[dataclasses.replace(table, title=before + table.title) for table in tables],
        caveats=[before + sentence for sentence in caveats.cautions(compared[0]) + caveats.caveats(compared[0])],
    )


def _metrics(rows: Sequence[Row]) -> list[str]:
    """Return the metrics to compare: time to target and speed, if they were measured, or else accuracy."""
    ok = [run for run in collect_runs(rows) if run.ended_well]
    measured = [("time_to_target_s", "target_accuracy"), ("samples_per_s", "samples_per_s")]
    return [metric for metric, column in measured if any(run[column] is not None for run in ok)] or ["test_accuracy"]


def _figures(results: Results, files: Sequence[tuple[FileKind, Path]]) -> tuple[list[Figure], list[str]]:
    """Return the pictures of the rows and of other files, and the reasons why other pictures are missing."""
    drawn, not_drawn = [], []
    for name, kind in kinds().items():
        try:
            drawn.append(Figure(svg=inline_svg(kind.draw(results), name), reading=kind.reading))
        except NotDrawable as error:
            not_drawn.append(str(error))
    for number, (file_kind, file) in enumerate(files):
        try:
            svg = inline_svg(file_kind.draw(file, results.methods), f"{file_kind.name}-{number}")
            drawn.append(Figure(svg=svg, reading=f"{file_kind.reading} Drawn from {file}."))
        except NotDrawable as error:
            not_drawn.append(str(error))
    return drawn, not_drawn


def _values(rows: Sequence[Row], name: str) -> str:
    """Return the values of a column in words, or their range if there are many."""
    values = [format_value(name, value) for value in sorted({row[name] for row in rows} - {None})]
    if len(values) >= _FEW and METRICS_BY_NAME[name].unit:
        return f"{values[0]} to {values[-1]}"
    return " and ".join(values)
