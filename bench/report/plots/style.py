"""Define the common style of all pictures, and write pictures to files.

The pictures are readable in print, in grey and by colour-blind people.

Source: M. Okabe and K. Ito, "Color Universal Design" (2008): eight colours that can be distinguished with any kind of
colour vision.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import io
import os
import re
import textwrap
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from bench.core.files import writing
from bench.core.schema import METRICS_BY_NAME
from bench.core.units import scale_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from bench.report.quality import Metric

INK = "#1a1a1a"
GREY = "#8c8c8c"
BAND = "#d9d9d9"  # like the grid, so that a page in dark colours replaces both
# Okabe and Ito's colours, the darkest first; yellow, which is faint on paper, comes last.
PALETTE = ("#1a1a1a", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#f0e442")

# Five line styles, seven markers and eight colours give 280 curves before a combination repeats.
_LINES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

_WIDTH_IN = 6.5  # the text width of A4 and letter paper
_WRAP = 88  # characters of 8 points in that width
_LEGEND_LINE_IN = 0.17
_WIDE_RANGE = 20.0
_TOOLTIPS_OF: weakref.WeakKeyDictionary[Figure, list[tuple[str, ...]]] = weakref.WeakKeyDictionary()

_SETTINGS: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": "#d9d9d9",
    "grid.linewidth": 0.6,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "legend.handlelength": 3.2,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,
    "savefig.dpi": 200,
    "svg.hashsalt": "bench",
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def applied() -> contextlib.AbstractContextManager[None]:
    """Return a context manager with which matplotlib uses the common style, regardless of the user's matplotlibrc."""
    os.environ["MPLBACKEND"] = "agg"  # with an unknown backend, such as that of Jupyter, the import would fail
    os.environ.pop("SOURCE_DATE_EPOCH", None)  # pictures have no date, and an invalid value would be an error
    import matplotlib.style

    return matplotlib.style.context(["default", _SETTINGS])


def new_figure(
    *, height: float = 3.4, width: float = _WIDTH_IN, rows: int = 1, columns: int = 1, title: str = "", **more: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure and its axes row by row.

    Args:
        height: height in inches without the legend, which `with_legend` adds.
        width: width in inches; by default that of the text of a printed page.
        rows: number of rows of axes.
        columns: number of columns of axes.
        title: the title, above the first axes.
        more: further arguments of ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    panels = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
    panels[0].set_title(title)
    return figure, panels


def line(index: int, curve: int = 0) -> dict[str, Any]:
    """Return matplotlib's arguments for a curve: its colour, line style and marker.

    Args:
        index: index of the method, which decides the colour.
        curve: index of the curve among the curves of this method in the picture; it varies line style and marker.
    """
    return {"linestyle": _LINES[(index + curve) % len(_LINES)], **marker(index, curve)}


def marker(index: int, curve: int = 0) -> dict[str, Any]:
    """Return matplotlib's arguments for points: their colour and marker.

    Args:
        index: index of the method, which decides the colour.
        curve: index of the curve among the curves of this method in the picture; it varies the marker.
    """
    return {"color": PALETTE[index % len(PALETTE)], "marker": _MARKERS[(index + curve) % len(_MARKERS)]}


@dataclasses.dataclass
class Methods:
    """The colours of methods; all pictures that are drawn with the same object use the same colours.

    Attributes:
        known: methods in the order of their colours, without repetitions; each is a tuple of compressor, collective and
            other settings.
    """

    known: list[tuple[str, ...]] = dataclasses.field(default_factory=list)

    def index(self, *method: str) -> int:
        """Return the index of the first known method that begins with these settings; add the method if none does.

        Args:
            method: the compressor, optionally followed by the collective and other settings.
        """
        for index, known in enumerate(self.known):
            if known[: len(method)] == method:
                return index
        self.known.append(method)
        return len(self.known) - 1


def tooltips(artist: Any, *texts: str) -> None:
    """Add tooltips to a matplotlib artist; browsers show them in SVG files.

    Args:
        artist: a curve, bar, mesh or other artist.
        texts: one text for the whole artist, or one for each of its points.
    """
    artist.set_gid(f"tooltip-{len(_TOOLTIPS_OF.setdefault(artist.figure, []))}")
    _TOOLTIPS_OF[artist.figure].append(texts)


def quality_axis(axes: Axes, quality: Metric) -> None:
    """Label the y axis with the quality; an axis of accuracy ends at 100 %. Call this after everything is drawn."""
    if quality.is_share:
        low = float(axes.dataLim.intervaly[0])
        margin = 0.05 * (1.0 - low) or 0.01
        axes.set_ylim(low - margin, 1.0 + margin / 2)
    name_axis(axes, "y", f"test {quality.noun}", quality.column)


def whiskers(intervals: Sequence[tuple[float, float | None, float | None]]) -> list[list[float]]:
    """Return the lengths of the lower and of the upper error bars, as matplotlib's ``errorbar`` takes them.

    Negative lengths become 0: rounding may place the mean of equal values slightly outside of their range.

    Args:
        intervals: one tuple (value, low, high) per point; a bound of None has an error bar of length 0.
    """
    return [
        [0.0 if low is None else max(0.0, value - low) for value, low, _ in intervals],
        [0.0 if high is None else max(0.0, high - value) for value, _, high in intervals],
    ]


def wrapped(text: str, width: int) -> str:
    """Break the text into lines of at most ``width`` characters, if necessary also between a component's options."""
    return textwrap.fill(re.sub(r",(?! )", ", ", text), width)


def with_legend(figure: Figure, entries: Mapping[str, Any], alt: str) -> Picture:
    """Add a legend below all axes, and return the picture.

    The legend has as many columns as fit, and the figure grows by the height of the legend.

    Args:
        figure: the figure.
        entries: for each text in the legend, the artist that it explains.
        alt: text for people who cannot see the picture.
    """
    room = int(_WRAP * figure.get_figwidth() / _WIDTH_IN)
    names = [wrapped(name, room) for name in entries]
    columns = max(1, min(3, room // (max(map(len, names)) + 7)))
    figure.legend(list(entries.values()), names, loc="outside lower left", ncols=columns)
    lines = sum(name.count("\n") + 1 for name in names[::columns])
    figure.set_figheight(figure.get_figheight() + lines * _LEGEND_LINE_IN)
    return Picture(figure=figure, alt=alt)


def name_axis(axes: Axes, which: Literal["x", "y"], what: str, column: str | None, *, log: bool = False) -> None:
    """Label an axis with its quantity and unit, and write its ticks in this unit.

    The unit is scaled to the largest number, for example to ms or MB. Call this after everything is drawn, because the
    unit depends on the numbers.

    Args:
        axes: the axes.
        which: the axis to label.
        what: the quantity in words.
        column: the column of metrics.csv whose unit the numbers have; None for a factor, which has no unit.
        log: make the axis logarithmic if the numbers span a wide range.
    """
    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    if log and low > 0.0 and high / low > _WIDE_RANGE:
        axes.set(**{f"{which}scale": "log"})
    unit = METRICS_BY_NAME[column].unit if column else ""
    factor, unit = (0.01, "%") if column == "test_accuracy" else scale_of(unit, axis.get_view_interval()[1])
    if column in ("epoch", "step"):  # counts
        axes.locator_params(which, integer=True)
    write_ticks(axes, which, factor)
    axes.set(**{f"{which}label": f"{what} ({unit})" if unit else what})


def write_ticks(axes: Axes, which: Literal["x", "y"], factor: float = 1.0) -> None:
    """Write the ticks of an axis as plain numbers, divided by ``factor``."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / factor:.6g}"))
    axis.set_minor_formatter(NullFormatter())


# Without date and version of matplotlib, so that equal rows give equal files.
_UNDATED: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
_DESCRIPTION = {"png": "Description", "svg": "Description", "pdf": "Subject"}
SUFFIXES = tuple(f".{name}" for name in _UNDATED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure, and a text (``alt``) for people who cannot see it."""

    figure: Figure
    alt: str


def save(picture: Picture, path: Path) -> None:
    """Write a picture as PNG, SVG or PDF, depending on the suffix of the path.

    The picture's ``alt`` text becomes the description in the file's metadata.

    Raises:
        UsageError: the file cannot be written.
    """
    form = path.suffix.lower().removeprefix(".")
    metadata = _UNDATED[form] | {_DESCRIPTION[form]: picture.alt}
    with writing(path), applied():
        if form == "svg":
            path.write_text(_svg(picture, metadata=metadata), encoding="utf-8")
        else:
            picture.figure.savefig(path, format=form, metadata=metadata)


def inline_svg(picture: Picture, name: str) -> str:
    """Return an ``svg`` element to embed in a page, with the picture's ``alt`` text as its label.

    All ids in the element begin with ``name``, so that ids of several pictures on one page differ.
    """
    svg = re.sub(r"<!--.*?-->", "", _svg(picture, metadata=_UNDATED["svg"], transparent=True), flags=re.DOTALL)
    element = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg[svg.index("<svg") :])
    return element.replace("<svg", f'<svg role="img" aria-label="{html.escape(picture.alt)}"', 1)


def _svg(picture: Picture, **options: Any) -> str:
    # Tooltips are ``title`` elements, which browsers show.
    buffer = io.StringIO()
    with applied():
        picture.figure.savefig(buffer, format="svg", **options)
    svg = buffer.getvalue()
    for number, texts in enumerate(_TOOLTIPS_OF.get(picture.figure, [])):
        before, start, after = svg.partition(f'<g id="tooltip-{number}">')
        content, end, rest = after.partition('<g id="')
        svg = before + _with_titles(start + content, texts) + end + rest
    return svg


def _with_titles(group: str, texts: Sequence[str]) -> str:
    # Add one title to a whole group of SVG elements, or one title to each point of the group.
    titles = [f"<title>{html.escape(text)}</title>" for text in texts]
    tag = "use" if "<use " in group else "path"  # markers of a curve, or cells of a mesh
    points = re.compile(rf"<{tag} ([^>]*)/>")
    if len(titles) == 1:
        return group.replace(">", f">{titles[0]}", 1)
    if len(points.findall(group)) != len(titles):  # some lie outside the axes
        return group
    remaining = iter(titles)
    return points.sub(lambda point: f"<{tag} {point[1]}>{next(remaining)}</{tag}>", group)
