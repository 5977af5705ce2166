"""`bench report`, which writes a comparison of runs as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from bench.api.pictures import report as write
from bench.api.progress import warn
from bench.cli.compare import RunPaths
from bench.core.run_folder import REPORT, RUNS_FOLDER

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
    written = write(paths or [RUNS_FOLDER], baseline=baseline, out=out)
    typer.echo(str(written))
    typer.echo(f"wrote {out}", err=True)
    for sentence in written.content.caveats:
        warn(sentence)
