"""`bench plot`, which draws runs and predictions as pictures."""

from pathlib import Path
from typing import Annotated

import typer

from bench.api.pictures import ALL, PictureFormat, draw
from bench.cli.compare import RunPaths
from bench.cli.options import complete_from
from bench.core.run_folder import PLOTS_FOLDER
from bench.report.plots.kinds import file_kinds, kinds

EXAMPLES = """[bold]Examples[/bold]

  bench plot all

  bench plot accuracy-time 'results/runs/2026*' --out curves.pdf

  bench plot results/runs/demo-20261129T150000 --out pictures

  bench plot bandwidth sweep/ --baseline bf16 --out break_even.png

  bench plot regime-map map.json --out map.svg"""

_SHOWN = {name: kind.shows for name, kind in kinds().items()} | {
    kind.name: kind.shows for kind in file_kinds().values()
}
_COMPLETE_KIND = complete_from(lambda: _SHOWN | {ALL: "every kind that can be drawn from the rows"})


def plot(
    kind: Annotated[
        str, typer.Argument(help="What to draw.", metavar="KIND", autocompletion=_COMPLETE_KIND, show_default=False)
    ],
    paths: RunPaths = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Row that speed-ups are relative to: a compressor, COMPRESSOR+COLLECTIVE, or a run's name (default: "
            "bf16, else none).",
            metavar="SPEC",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="A file (.png, .svg or .pdf), or a folder for files named after the kinds.")
    ] = PLOTS_FOLDER,
    as_format: Annotated[PictureFormat, typer.Option("--format", help="Format of the files in a folder.")] = "svg",
) -> None:
    """Draw one KIND of picture of runs or of a decision, or `all` kinds; `bench plot FOLDER` draws all kinds, too."""
    for path in draw(kind, paths, baseline, out, as_format):
        typer.echo(f"wrote {path}", err=True)


plot.__doc__ = "\n\n".join([plot.__doc__ or "", *(f"  {name}: {shows}" for name, shows in _SHOWN.items())])
