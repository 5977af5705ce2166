"""The page: one HTML file that holds everything, for a screen or on paper, without a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from bench.core.environment import version_of
from bench.core.schema.metrics import METRICS_BY_NAME
from bench.report import caveats
from bench.report.baseline import NoSuchBaseline
from bench.report.comparison import compare
from bench.report.comparison_table import comparison_table, shared_settings
from bench.report.formats import format_value
from bench.report.page import origin, verdict
from bench.report.plots.kinds import KINDS
from bench.report.plots.picture import inline_svg
from bench.report.plots.predictions import PredictedKind
from bench.report.plots.results import NotDrawable, Results
from bench.report.runs import collect_runs
from bench.report.store import Row
from bench.report.tables import Table
from bench.report.workloads import Workload, by_workload

_FEW = 3  # numbers that a sentence can list


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
    """A picture on the page: an ``svg`` element and how to read it."""

    svg: str
    reading: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What is said of one workload.

    Attributes:
        label: what tells it from the others, empty where it is the only one.
        answer: the verdict in a sentence.
        evidence: a sentence for each row.
        shared: settings that all rows share.
        tables: one comparison per metric, the verdict's first.
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
    """What the template says, in its order; every text is escaped there, but for the elements of the figures."""

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
    predicted: Sequence[tuple[PredictedKind, Path]] = (),
) -> Page:
    """Put a report together.

    Args:
        results: rows, layers and the name of the baseline.
        environment_files: the ``environment.json`` of the runs, as far as they have one.
        left_out: sentences about what could not be read, for the caveats.
        predicted: files of predictions, with the kind of picture that each is drawn as.

    Raises:
        NoSuchBaseline: no row fits the baseline.
    """
    parts = _parts(by_workload(results.rows), results.baseline)
    figures, not_drawn = _figures(results, predicted)
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
    """What was asked, of the models, data sets and links that were tried."""
    models, datasets, links = (_values(rows, name) for name in ("model", "dataset", "uplink_bps"))
    link = f" over links of {links}" if links else ""
    return (
        f"Will compressing gradients make the training of {models or 'the model'} on {datasets or 'the data'} finish "
        f"sooner{link}, without losing accuracy?"
    )


def to_html(content: Page) -> str:
    """The page as HTML; every text from rows and files is escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=content)


def _parts(workloads: Sequence[Workload], baseline: str | None) -> list[Part]:
    """Each workload by itself; one that lacks the baseline has its own, if any other has the one that is asked for.

    Raises:
        NoSuchBaseline: none has it.
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
    without = f"{part.label}: no row fits --baseline {baseline}, so another one is taken"
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
    """What the comparisons are about: finishing sooner, where there is a target, and speed, where it was measured."""
    ok = [run for run in collect_runs(rows) if run.ended_well]
    measured = [("time_to_target_s", "target_accuracy"), ("samples_per_s", "samples_per_s")]
    return [metric for metric, column in measured if any(run[column] is not None for run in ok)] or ["test_accuracy"]


def _figures(results: Results, predicted: Sequence[tuple[PredictedKind, Path]]) -> tuple[list[Figure], list[str]]:
    """The pictures that the rows allow, and why not the others; then those of predictions."""
    drawn, not_drawn = [], []
    for name, kind in KINDS.items():
        try:
            drawn.append(Figure(svg=inline_svg(kind.draw(results), name), reading=kind.reading))
        except NotDrawable as error:
            not_drawn.append(str(error))
    for number, (predicted_kind, file) in enumerate(predicted):
        try:
            svg = inline_svg(predicted_kind.draw(file, results.methods), f"{predicted_kind.name}-{number}")
            drawn.append(Figure(svg=svg, reading=f"{predicted_kind.reading} Drawn from {file}."))
        except NotDrawable as error:
            not_drawn.append(str(error))
    return drawn, not_drawn


def _values(rows: Sequence[Row], name: str) -> str:
    """The values of a column, or from which to which they go where they are not few."""
    values = [format_value(name, value) for value in sorted({row[name] for row in rows} - {None})]
    if len(values) >= _FEW and METRICS_BY_NAME[name].unit:
        return f"{values[0]} to {values[-1]}"
    return " and ".join(values)
