"""`bench report`, which writes a comparison of runs as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from bench.api.progress import warn
from bench.cli.compare import RunPaths
from bench.core.files import check_writable, make_folder, writing
from bench.core.run_folder import REPORT, RUNS_FOLDER
from bench.report import artifacts, store
from bench.report.page import Page, page, to_html
from bench.report.plots.kinds import drawn_files
from bench.report.plots.results import Results

EXAMPLES = """[bold]Examples[/bold]

  bench report

  bench report sweep/ --baseline bf16 --out sweep.html

  bench report results/runs/demo-20261129T150000

  bench report results/runs curve.json map.json --out predicted.html"""


def report(
    paths: RunPaths = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Row that the others are compared with, as for bench compare.", metavar="SPEC", show_default=False
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The HTML file.", metavar="FILE")] = REPORT,
) -> None:
    """Write one HTML file: what is compared, the verdict, tables, pictures, caveats, machines and commands.

    The verdict is also printed. The file needs no network and can be printed. PATHS are runs, or the folder of a
    decision. If they contain files that bench predict wrote (the JSON of a sweep, or the table of --validate), the HTML
    file also shows their pictures.
    """
    paths = paths or [RUNS_FOLDER]
    if out == REPORT:
        make_folder(out.parent)
    if not out.exists() or out.is_file():  # the file may also be a terminal
        check_writable(out)
    content = _content(paths, baseline)
    with writing(out):
        out.write_text(to_html(content), encoding="utf-8")
    typer.echo(content.question)
    for section in content.sections:
        typer.echo(f"{section.label}: {section.answer}" if section.label else section.answer)
    typer.echo(f"wrote {out}", err=True)
    for sentence in content.caveats:
        warn(sentence)


def _content(paths: list[Path], baseline: str | None) -> Page:
    if shown := artifacts.to_show(paths, {"--baseline": baseline}):
        views, path = shown
        return views.page(path)
    files = drawn_files(paths)
    left_out: list[str] = []
    results = Results(
        rows=store.read(paths, without=[file for _, file in files], warn=left_out.append),
        layers=store.read_layers(paths, warn=left_out.append),
        baseline=baseline,
    )
    return page(results, store.beside(paths, "environment.json"), left_out, files)
