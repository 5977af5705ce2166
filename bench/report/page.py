"""Write the HTML report: one self-contained file for the screen or for printing."""

import collections
import dataclasses
import json
import shlex
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path

from bench.core.environment import version_of
from bench.core.schema import METRICS_BY_NAME
from bench.report import verdict
from bench.report.baseline import NoSuchBaseline
from bench.report.columns import format_value
from bench.report.comparison import compare
from bench.report.comparison_table import answer_table, shared_settings
from bench.report.groups import by_workload
from bench.report.plots import style
from bench.report.plots.kinds import FileKind, kinds
from bench.report.plots.results import NotDrawable, Results
from bench.report.quality import Metric, quality_of
from bench.report.store import Row, Run, collect_runs
from bench.report.tables import Table, TableCell, TableColumn

_FEW = 3  # from this many values on, a sentence shows only their range
_MACHINE = ("host", "cpu", "device", "threads", "torch_version", "kernels", "git_sha", "git_dirty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """The part of the report about one workload.

    Attributes:
        label: the settings that distinguish this workload from the report's other workloads; empty if there are no
            others.
        answer: the verdict in one sentence.
        evidence: for each compared row, a sentence with its measured effects.
        shared: settings that all rows have in common, as text by name.
        tables: one comparison table per metric; the verdict is about the first table.
        caveats: sentences about everything that weakens the verdict.
        figures: pictures of the verdict, shown below it, as in `Page`.
    """

    label: str
    answer: str
    evidence: Sequence[str]
    shared: dict[str, str]
    tables: Sequence[Table]
    caveats: Sequence[str]
    figures: Sequence[tuple[str, str]] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """The contents of the report, for the template ``page.html.jinja``.

    The template escapes all texts except the ``svg`` elements.

    Attributes:
        question: the question that the report answers, in one sentence.
        sections: one per workload.
        figures: tuples of an ``svg`` element and a text that explains how to read the picture.
        not_drawn: for each kind of picture that is missing, a sentence that says why.
        caveats: sentences about everything that weakens the verdicts, and about files that could not be read.
        machines: the machines and versions that the runs used, with the number of runs on each.
        versions: the versions of system, Python and packages; one text per environment.
        commands: the command lines that started the runs.
        reading: sentences that explain how to read the verdicts.
    """

    question: str
    sections: Sequence[Section]
    figures: Sequence[tuple[str, str]]
    not_drawn: Sequence[str]
    caveats: Sequence[str]
    machines: Table
    versions: Sequence[str]
    commands: Sequence[str]
    reading: str = (
        "Factors above 1x are better than the baseline; brackets are 95 % intervals over seeds. A row is called "
        "faster, slower, higher or lower only where the difference is significant and of practical size."
    )


def page(
    results: Results,
    environment_files: Sequence[Path],
    left_out: Sequence[str],
    files: Sequence[tuple[FileKind, Path]] = (),
) -> Page:
    """Return the contents of a report.

    Args:
        results: rows, layers and the name of the baseline.
        environment_files: the runs' ``environment.json`` files that exist.
        left_out: sentences about files that could not be read; they are added to the caveats.
        files: files to draw that do not belong to runs, such as predictions, as tuples (kind of picture, file).

    Raises:
        NoSuchBaseline: no row of any workload matches the baseline that the user named.
    """
    sections = _sections(results)
    figures, not_drawn = _figures(results, files)
    versions, commands, unread = environments(environment_files)
    models, datasets, links = (_values(results.rows, name) for name in ("model", "dataset", "uplink_bps"))
    return Page(
        question=question(models, datasets, f"links of {links}" if links else "", results.quality),
        sections=sections,
        figures=figures,
        not_drawn=not_drawn,
        caveats=[sentence for section in sections for sentence in section.caveats]
        + [*results.left_out, *left_out, *unread],
        machines=machines_of(collect_runs(results.rows)),
        versions=versions,
        commands=commands,
    )


def question(models: str, datasets: str, links: str, quality: Metric) -> str:
    """Return the question that a report answers; an empty text stands for something that is unknown."""
    over = f" over {links}" if links else ""
    return (
        f"Will compressing gradients make the training of {models or 'the model'} on {datasets or 'the data'} finish "
        f"sooner{over}, with no worse {quality.noun}?"
    )


def machines_of(runs: Sequence[Run]) -> Table:
    """Return the table of the machines and versions that runs used."""
    machines = collections.Counter(tuple(run[name] for name in _MACHINE) for run in runs)
    return Table(
        title="Machines and versions",
        columns=[*(TableColumn(name, "left", int(name != "host")) for name in _MACHINE), TableColumn("runs")],
        rows=[
            [TableCell(text=text) for text in (*map(format_value, _MACHINE, values), str(num_runs))]
            for values, num_runs in machines.items()
        ],
    )


def to_html(content: Page) -> str:
    """Return the report as one HTML page; all texts from rows and files are escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(page=content, version=version_of("gradwire"))


def _values(rows: Sequence[Row], name: str) -> str:
    # Join the values in words; if there are many, give their range.
    values = [format_value(name, value) for value in sorted({row[name] for row in rows} - {None})]
    are_many = len(values) >= _FEW and METRICS_BY_NAME[name].unit
    return f"{values[0]} to {values[-1]}" if are_many else " and ".join(values)


def _sections(results: Results) -> list[Section]:
    """Return one section per workload.

    If no row of a workload matches the baseline that the user named, this workload uses its default baseline.

    Raises:
        NoSuchBaseline: no row of any workload matches the baseline that the user named.
    """
    sections, errors = [], []
    for label, rows in by_workload(results.rows):
        try:
            sections.append(_section(label, rows, results.baseline))
        except NoSuchBaseline as error:
            errors.append(error)
            section = _section(label, rows, None)
            without = f"{label}: no row fits --baseline {results.baseline}, so the default baseline is used"
            sections.append(dataclasses.replace(section, caveats=[without, *section.caveats]))
    if len(errors) == len(sections):
        raise errors[0]
    return sections


def _section(label: str, rows: Sequence[Row], baseline: str | None) -> Section:
    # Compare time to target and speed if they were measured; otherwise compare quality.
    runs = collect_runs(rows)
    ok = [run for run in runs if run.ended_well]
    quality = quality_of(run.last_known for run in runs)
    columns = {"time_to_target_s": quality.target_column, "samples_per_s": "samples_per_s"}
    measured = [
        metric for metric, column in columns.items() if any(run.last_known.get(column) is not None for run in ok)
    ]
    compared = [compare(rows, baseline=baseline, metric=metric) for metric in measured or [quality.column]]
    tables = [answer_table(comparison).without_empty_columns() for comparison in compared]
    before = f"{label}: " if label else ""
    return Section(
        label=label,
        answer=verdict.answer(compared[0]),
        evidence=list(map(verdict.evidence, compared[0].candidates)),
        shared=shared_settings(compared[0]),
        tables=[dataclasses.replace(table, title=before + table.title) for table in tables],
        caveats=[before + text for text in (*verdict.cautions(compared[0]), *verdict.caveats(compared[0]))],
    )


def _figures(results: Results, files: Sequence[tuple[FileKind, Path]]) -> tuple[list[tuple[str, str]], list[str]]:
    drawn, not_drawn = [], []
    of_rows = [(name, kind.reading_for(results), partial(kind.draw, results)) for name, kind in kinds().items()]
    of_files = [
        (f"{kind.name}-{number}", f"{kind.reading} Drawn from {file}.", partial(kind.draw, file, results.methods))
        for number, (kind, file) in enumerate(files)
    ]
    for name, reading, draw in [*of_rows, *of_files]:
        try:
            drawn.append((style.inline_svg(draw(), name), reading))
        except NotDrawable as error:
            not_drawn.append(str(error))
    return drawn, not_drawn


def environments(files: Sequence[Path]) -> tuple[list[str], list[str], list[str]]:
    """Read ``environment.json`` files.

    Returns:
        Three lists without repetitions: texts with the versions of system, Python and packages; command lines; and
        a sentence for each file that cannot be used.
    """
    versions, commands, unread = [], [], []
    for file in files:
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            packages = [f"{name} {version}" for name, version in found["packages"].items()]
            version = ", ".join([found["system"], f"Python {found['python']}", *packages])
            program, *arguments = found["command"]
            is_ours = Path(program).name in ("bench", "__main__.py")
            command = shlex.join([*(["bench"] if is_ours else ["python", program]), *arguments])
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            unread.append(f"{file} is left out, because it is not an environment.json of bench: {error}")
        else:
            versions.append(version)
            commands.append(command)
    return list(dict.fromkeys(versions)), list(dict.fromkeys(commands)), unread
