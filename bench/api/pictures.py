"""`bench.plot` and `bench.report`: write pictures of runs, or the report about them, as the commands do."""

from __future__ import annotations

import base64
import dataclasses
import html
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from bench.api.comparing import listed
from bench.api.progress import warn
from bench.core.errors import UsageError
from bench.core.files import check_writable, make_folder, writing
from bench.core.run_folder import PLOTS_FOLDER, REPORT, RUNS_FOLDER
from bench.core.waiting import waiting
from bench.report import artifacts, store
from bench.report.page import Page, page, to_html
from bench.report.plots.kinds import drawn_files, file_kinds, kinds
from bench.report.plots.results import NotDrawable, Results
from bench.report.plots.style import SUFFIXES, Picture, save
from collectives.options import did_you_mean

ALL = "all"
PictureFormat = Literal["png", "svg", "pdf"]


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Pictures that were written; a notebook shows them.

    Attributes:
        files: the files, one per picture.
    """

    files: list[Path]

    def _repr_html_(self) -> str:
        return "\n".join(map(_shown, self.files))


@dataclasses.dataclass(frozen=True)
class Report:
    """A report that was written; printing it shows the verdict, and a notebook shows the whole page.

    Attributes:
        file: the HTML file.
        content: what the page says: question, sections with verdicts and tables, caveats.
    """

    file: Path
    content: Page = dataclasses.field(repr=False)

    def __str__(self) -> str:
        """Return the question, and below it the verdict on each workload."""
        answers = (f"{part.label}: {part.answer}" if part.label else part.answer for part in self.content.sections)
        return "\n".join([self.content.question, *answers])

    def _repr_html_(self) -> str:
        return f'<iframe style="width: 100%; height: 40em" srcdoc="{html.escape(to_html(self.content))}"></iframe>'


def plot(
    kind: str,
    paths: str | Path | Sequence[str | Path] = RUNS_FOLDER,
    *,
    baseline: str | None = None,
    out: str | Path = PLOTS_FOLDER,
    format: PictureFormat = "svg",  # noqa: A002 - the name of the option
) -> Pictures:
    """Draw pictures of runs or of a decision like `bench plot`.

    Args:
        kind: what to draw, such as ``accuracy-time``, or ``all``; `bench plot --help` lists the kinds.
        paths: run folders, folders of runs, CSV files, or patterns of these; or one file that a command wrote.
        baseline: what speed-ups are relative to; by default ``bf16``, else ``none``.
        out: a file (.png, .svg or .pdf), or a folder for files named after the kinds.
        format: format of the files in a folder.

    Raises:
        UsageError: there is no such kind, or a file cannot be written.
        NothingToCompare: the rows lack what the picture shows.
    """
    return Pictures(list(draw(kind, [Path(each) for each in listed(paths)], baseline, Path(out), format)))


def draw(
    kind: str, paths: Sequence[Path] | None, baseline: str | None, out: Path, file_format: PictureFormat
) -> Iterator[Path]:
    """Draw pictures as `plot` does, and yield the path of each file as soon as it is written; None: all runs here."""
    is_file, known = out.suffix.lower() in SUFFIXES, [*kinds(), *file_kinds()]
    if kind not in (ALL, *known) and Path(kind).exists():
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
        raise UsageError(f"there is no picture '{kind}'{did_you_mean(kind, known)}; choose {', '.join(known)} or {ALL}")
    else:
        paths = paths or [RUNS_FOLDER]
        rows, layers = store.read(paths, warn=warn), store.read_layers(paths, warn=warn)
        drawn = _drawn(kind, Results(rows=rows, layers=layers, baseline=baseline))
    if not is_file:
        make_folder(out)
    is_empty = True
    for name, picture in drawn:
        is_empty, path = False, out if is_file else out / f"{name}.{file_format}"
        save(picture, path)
        yield path
    if is_empty:
        raise NotDrawable("no picture can be drawn from these rows; the warnings say what each picture needs")


def _drawn(kind: str, results: Results) -> Iterator[tuple[str, Picture]]:
    for sentence in results.left_out:
        warn(sentence)
    for name, each in kinds().items():
        try:
            if kind in (name, ALL):
                waiting.doing(f"drawing {name}")
                yield name, each.draw(results)
        except NotDrawable as error:
            if kind != ALL:
                raise
            warn(f"{name} is not drawn: {error}")


def _shown(file: Path) -> str:
    # Return HTML that shows a picture; a PDF is named only, because browsers do not show it inside a page.
    if file.suffix.lower() == ".pdf":
        return f"<p>{html.escape(str(file))}</p>"
    kind = "png" if file.suffix.lower() == ".png" else "svg+xml"
    return f'<img src="data:image/{kind};base64,{base64.b64encode(file.read_bytes()).decode()}">'


def report(
    paths: str | Path | Sequence[str | Path] = RUNS_FOLDER,
    *,
    baseline: str | None = None,
    out: str | Path = REPORT,
) -> Report:
    """Write the report about runs or a decision as one HTML file, like `bench report`.

    Args:
        paths: run folders, folders of runs, CSV files, or patterns of these; files of `bench predict` are drawn too.
        baseline: what the others are compared with, as for `bench.compare`.
        out: the HTML file.

    Raises:
        UsageError: the baseline is unknown, or a file cannot be read or written.
        NothingToCompare: there is no readable row.
    """
    out = Path(out)
    if out == REPORT:
        make_folder(out.parent)
    if not out.exists() or out.is_file():  # the file may also be a terminal
        check_writable(out)
    content = _content([Path(each) for each in listed(paths)], baseline)
    with writing(out):
        out.write_text(to_html(content), encoding="utf-8")
    return Report(file=out, content=content)


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
