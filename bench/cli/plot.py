"""`bench plot`, which draws runs and predictions as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from bench.cli.compare import DEFAULT_PATH, RunPaths, warn
from bench.core.errors import UsageError
from bench.core.files import make_folder
from bench.report.plots.kinds import PictureKind, file_kinds, kinds
from bench.report.plots.results import NotDrawable, Results
from bench.report.plots.style import SUFFIXES, Picture, save

EXAMPLES = """[bold]Examples[/bold]

  bench plot all

  bench plot accuracy-time 'results/runs/2026*' --out curves.pdf

  bench plot bandwidth sweep/ --baseline bf16 --out break_even.png

  bench plot regime-map map.json --out map.svg"""

ALL = "all"
DEFAULT_OUT = Path("results/plots")
_SHOWN = {name: kind.shows for name, kind in kinds().items()}
_SHOWN |= {name: kind.shows for name, kind in file_kinds().items()}
_LIST = "\n\n".join(f"  {name}: {shows}" for name, shows in _SHOWN.items())


def _complete_kind(incomplete: str) -> list[tuple[str, str]]:
    words = _SHOWN | {ALL: "every kind that can be drawn from the rows"}
    return [(name, shows) for name, shows in words.items() if name.startswith(incomplete)]


def plot(
    kind: Annotated[
        str, typer.Argument(help="What to draw.", metavar="KIND", autocompletion=_complete_kind, show_default=False)
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
    ] = DEFAULT_OUT,
    as_format: Annotated[
        Literal["png", "svg", "pdf"], typer.Option("--format", help="Format of the files in a folder.")
    ] = "svg",
) -> None:
    """Draw one KIND of picture of runs, or `all` kinds that can be drawn from the rows."""
    from bench.report import store

    if kind in file_kinds():
        _draw_file(kind, paths, baseline, out, as_format)
        return
    chosen = _chosen(kind)
    is_file = out.suffix.lower() in SUFFIXES
    if is_file and kind == ALL:
        raise UsageError(f"--out {out} is one file; give a folder for all kinds, or one kind")
    paths = paths or [DEFAULT_PATH]
    results = Results(rows=store.read(paths, warn=warn), layers=store.read_layers(paths, warn=warn), baseline=baseline)
    if not is_file:
        make_folder(out)
    num_drawn = 0
    for each in chosen:
        try:
            picture = each.draw(results)
        except NotDrawable as error:
            if kind != ALL:
                raise
            warn(f"{each.name} is not drawn: {error}")
        else:
            _save(picture, each.name, out, as_format)
            num_drawn += 1
    if not num_drawn:
        raise NotDrawable("no picture can be drawn from these rows; the warnings say what each picture needs")


def _draw_file(kind: str, paths: Sequence[Path] | None, baseline: str | None, out: Path, as_format: str) -> None:
    """Draw one file that is no run, such as one that `bench predict` wrote."""
    if baseline is not None or paths is None or len(paths) != 1:
        maker = file_kinds()[kind].made_by
        raise UsageError(f"{kind} draws one file that {maker} wrote, without --baseline; name it after the kind")
    picture = file_kinds()[kind].draw(paths[0])
    if out.suffix.lower() not in SUFFIXES:
        make_folder(out)
    _save(picture, kind, out, as_format)


def _save(picture: Picture, name: str, out: Path, as_format: str) -> None:
    file = out if out.suffix.lower() in SUFFIXES else out / f"{name}.{as_format}"
    save(picture, file)
    typer.echo(f"wrote {file}", err=True)


def _chosen(kind: str) -> list[PictureKind]:
    if kind == ALL:
        return list(kinds().values())
    if kind not in kinds():
        from collectives.options import did_you_mean  # imports pydantic, so only if it is needed

        raise UsageError(
            f"there is no picture '{kind}'{did_you_mean(kind, _SHOWN)}; choose {', '.join(_SHOWN)} or {ALL}"
        )
    return [kinds()[kind]]


plot.__doc__ = f"{plot.__doc__}\n\n{_LIST}"
