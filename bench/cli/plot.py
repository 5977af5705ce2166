"""`bench plot`, which draws runs and predictions as pictures."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.api.progress import warn
from bench.cli.compare import RunPaths
from bench.cli.options import complete_from
from bench.core.errors import UsageError
from bench.core.files import make_folder
from bench.core.run_folder import PLOTS_FOLDER, RUNS_FOLDER
from bench.report import artifacts, store
from bench.report.plots.kinds import file_kinds, kinds
from bench.report.plots.results import NotDrawable, Results
from bench.report.plots.style import SUFFIXES, Picture, save
from collectives.options import did_you_mean

EXAMPLES = """[bold]Examples[/bold]

  bench plot all

  bench plot accuracy-time 'results/runs/2026*' --out curves.pdf

  bench plot results/runs/demo-20261129T150000 --out pictures

  bench plot bandwidth sweep/ --baseline bf16 --out break_even.png

  bench plot regime-map map.json --out map.svg"""

ALL = "all"
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
    as_format: Annotated[
        Literal["png", "svg", "pdf"], typer.Option("--format", help="Format of the files in a folder.")
    ] = "svg",
) -> None:
    """Draw one KIND of picture of runs or of a decision, or `all` kinds; `bench plot FOLDER` draws all kinds, too."""
    is_file = out.suffix.lower() in SUFFIXES
    if kind not in (ALL, *_SHOWN) and Path(kind).exists():
        kind, paths = ALL, [Path(kind), *(paths or [])]
    shown = artifacts.to_show(paths or [RUNS_FOLDER], {"--baseline": baseline}) if kind not in file_kinds() else None
    if is_file and kind == ALL:
        raise UsageError(f"--out {out} is one file; give a folder for all kinds, or one kind")
    if shown:
        views, path = shown
        pictures = views.pictures(path)
        if kind not in (ALL, *pictures):
            raise NotDrawable(f"{path} has no picture '{kind}'; choose {', '.join(pictures)} or {ALL}")
        drawn: Iterable[tuple[str, Picture]] = [each for each in pictures.items() if kind in (ALL, each[0])]
    elif kind in file_kinds():
        of_file = file_kinds()[kind]
        if baseline is not None or paths is None or len(paths) != 1:
            raise UsageError(f"{kind} draws one file that {of_file.made_by} wrote; write: bench plot {kind} FILE")
        drawn = [(kind, of_file.draw(paths[0]))]
    elif kind not in (ALL, *kinds()):
        raise UsageError(
            f"there is no picture '{kind}'{did_you_mean(kind, _SHOWN)}; choose {', '.join(_SHOWN)} or {ALL}"
        )
    else:
        paths = paths or [RUNS_FOLDER]
        rows, layers = store.read(paths, warn=warn), store.read_layers(paths, warn=warn)
        drawn = _drawn(kind, Results(rows=rows, layers=layers, baseline=baseline))
    if not is_file:
        make_folder(out)
    written = []
    for name, picture in drawn:
        written.append(out if is_file else out / f"{name}.{as_format}")
        save(picture, written[-1])
        typer.echo(f"wrote {written[-1]}", err=True)
    if not written:
        raise NotDrawable("no picture can be drawn from these rows; the warnings say what each picture needs")


def _drawn(kind: str, results: Results) -> Iterator[tuple[str, Picture]]:
    for sentence in results.left_out:
        warn(sentence)
    for name, each in kinds().items():
        try:
            if kind in (name, ALL):
                yield name, each.draw(results)
        except NotDrawable as error:
            if kind != ALL:
                raise
            warn(f"{name} is not drawn: {error}")


plot.__doc__ = "\n\n".join([plot.__doc__ or "", *(f"  {name}: {shows}" for name, shows in _SHOWN.items())])
